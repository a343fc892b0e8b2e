"""The interface of inference engines: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from threading import RLock
from typing import Any, Self

import torch
from torch.nn.utils.rnn import pad_sequence

from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.state_dict.buckets import grouped
from nrl_models.common.value_checks import is_integer
from nrl_models.engines.answers import require_complete
from nrl_models.engines.engine_types import (
    Capabilities,
    ModuleCall,
    NamedTensor,
    RefitReport,
    Sample,
    Tokens,
)
from nrl_models.engines.input_checks import plain_tokens, require_lengths, require_limits, require_sampling
from nrl_models.engines.transfer.sent_tensors import finite
from nrl_models.errors import EngineError, MixedWeightsError, listed, one_line, shown
from nrl_models.logprobs.sampling import Sampling

_RANDOM = ("start", "_generate", "score", "_refit", "module_calls", "close")
"""Methods in which an engine may seed or draw random numbers."""

_ANSWERS = ("_generate", "score", "module_calls")
"""Methods that compute with the weights."""


class Engine(AbstractContextManager["Engine"]):
    """Base class of inference engines. Use it as a context manager to close the engine at the end.

    Three groups of methods are wrapped in every subclass:

    - Methods in `_RANDOM` restore the caller's random states.
    - Methods in `_ANSWERS` raise `MixedWeightsError` during a refit and after a refit that failed halfway.
    - Methods in `_ANSWERS` and `refit` share a lock, so calls from several threads run one after another.

    Attributes:
        name: Engine name in reports.
        bucket_bytes: Default bucket size of refits in bytes. None sends all tensors in one bucket.
        version: Version of the weights: 0 at the start, incremented by each refit.
    """

    name: str
    bucket_bytes: int | None = None
    version: int = 0
    _mixed: str = ""
    """Error message of `_ANSWERS` methods while the weights are of two versions; otherwise empty."""
    _changed: bool = False
    """Whether the last `_refit` changed a weight, or may have changed one."""
    _lock: RLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the engine's lock here, so that subclasses need not call `super().__init__`."""
        engine = super().__new__(cls)
        engine._lock = RLock()
        return engine

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, version={self.version})"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _ANSWERS:
            if (method := cls.__dict__.get(name)) is not None:
                setattr(cls, name, _of_whole_weights(method))
        for name in _RANDOM:
            method = cls.__dict__.get(name)
            if isinstance(method, classmethod):
                setattr(cls, name, classmethod(random_states_kept()(method.__func__)))
            elif method is not None:
                setattr(cls, name, random_states_kept()(method))

    def capabilities(self) -> Capabilities:
        """Return the capabilities of this engine with its current options."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the engine's version and settings, for reports."""
        return {"engine": self.name}

    def generate(
        self,
        prompts: Sequence[Tokens],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int = 0,
        ignore_end: bool = True,
        beyond_limit: bool = False,
        model_inputs: Sequence[Mapping[str, torch.Tensor]] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> list[Sample]:
        """Sample a continuation of each prompt, all in one batch.

        There are two ways to pass images; `capabilities()` tells which of them the engine supports:

        - `model_inputs`: the output of a processor. The prompts are the token ids from the same processor.
        - `images`: PIL images. The prompts have one placeholder token per image, as in the text.

        With images, a completion also ends if the model samples an image token, because no text follows from it.
        `finish_reason` is then `placeholder`.

        Args:
            prompts: Token ids of each prompt.
            sampling: Temperature and truncation.
            max_new_tokens: Maximum number of new tokens; the exact number if `ignore_end`.
            seed: Random seed. Each prompt gets a separate seed derived from it.
            ignore_end: Whether to continue after an end-of-text token.
            beyond_limit: Skip the check of lengths, so that the engine itself has to stop at its length limit.
            model_inputs: Keyword arguments of the model's forward for each prompt (batch size 1), in addition to the
                token ids. Empty for a prompt without images.
            images: PIL images of each prompt, in the order of their placeholders. `Sample.prompt` then has the token
                ids from the engine's processor.

        Raises:
            EngineError: If a prompt is too long, `max_new_tokens` is below 1, or the engine does not support the
                temperature or images. Also if the engine fails or ends a sequence early.
        """
        require_sampling(self, sampling)
        require_limits(self, sampling, max_new_tokens)
        if not is_integer(seed, 1 - 2**63, 2**63 - 1):
            raise EngineError(f"seed={shown(seed)}: expected a whole number of at most 63 bits")
        require_lengths(self, prompts, 0 if beyond_limit else max_new_tokens)
        if not (prompts := plain_tokens(prompts)):
            return []
        more: dict[str, Any] = {}
        if model_inputs is not None and any(model_inputs):
            if not self.capabilities().images:
                raise EngineError(
                    f"{self.name} accepts only token ids here, and {sum(map(bool, model_inputs))} of {len(prompts)} "
                    "prompts have images. Use hf-generate with a model that accepts images"
                )
            more = {"model_inputs": model_inputs}
        if images is not None and any(images):
            if not self.capabilities().raw_images:
                raise EngineError(
                    f"{self.name} accepts no raw images here, and {sum(map(bool, images))} of {len(prompts)} prompts "
                    "have some. Use vllm with a model that accepts images and the checkpoint's processor"
                )
            more |= {"images": images}
        samples = self._generate(
            prompts, sampling, max_new_tokens=max_new_tokens, seed=seed, ignore_end=ignore_end, **more
        )
        if "model_inputs" in more:
            samples = [
                replace(sample, model_inputs=own) for sample, own in zip(samples, more["model_inputs"], strict=True)
            ]
        require_complete(self.name, samples, max_new_tokens, ignore_end=ignore_end, beyond_limit=beyond_limit)
        return samples

    def _generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        """Implement `generate` for prompts that fit. Engines with images also take `model_inputs` or `images`."""
        raise NotImplementedError

    def score(self, sequences: Sequence[Tokens], sampling: Sampling, *, last: int | None = None) -> list[list[float]]:
        """Return the log-probability of each token given the tokens before it, computed in one prefill.

        The value for the first token of each sequence is NaN.

        Args:
            sequences: Token ids of each sequence.
            sampling: Temperature and truncation applied to the logits before the softmax.
            last: Number of tokens at the end to score; the others may be NaN. All tokens by default.

        Raises:
            EngineError: If the engine cannot score tokens, a sequence is too long, or the engine fails.
        """
        raise EngineError(f"{self.name} cannot score existing tokens")

    def refit(
        self,
        tensors: Iterable[NamedTensor],
        *,
        bucket_bytes: int | None = None,
        digests: bool = True,
        partial: bool = False,
    ) -> RefitReport:
        """Load new weights into the engine.

        Afterwards the engine has all new weights or all old weights. If neither is possible, it raises
        `MixedWeightsError` for all calls until a refit succeeds.

        Args:
            tensors: Pairs of hub name and tensor, as from `StateDictAdapter.iter_export`.
            bucket_bytes: Maximum bytes per bucket; a larger tensor gets a separate bucket. Default:
                `self.bucket_bytes`.
            digests: Whether to compute `RefitReport.digests`.
            partial: Whether parameters and persistent buffers may keep their old values if nothing is written to
                them. By default this raises `MixedWeightsError`, because the weights would be of two versions.

        Raises:
            MixedWeightsError: If only some of the weights were written. If the `tensors` iterator raised, its error
                is re-raised with this message as a note.
            EngineError: If the engine does not support refits or rejects a tensor (NaN or infinite values, another
                dtype or shape, a duplicate name). The engine keeps its old weights.
        """
        if bucket_bytes is not None and type(bucket_bytes) is not int:
            raise EngineError(f"bucket_bytes={bucket_bytes!r}: expected a whole number of bytes, or None")
        with self._lock:
            return self._refit_whole(tensors, bucket_bytes, digests, partial)

    def _refit_whole(
        self, tensors: Iterable[NamedTensor], bucket_bytes: int | None, digests: bool, partial: bool
    ) -> RefitReport:
        """Implement `refit`. The caller holds the lock."""
        started = time.perf_counter()
        sizes: list[list[int]] = []

        def sent() -> Iterator[list[NamedTensor]]:
            limit = self.bucket_bytes if bucket_bytes is None else bucket_bytes
            for bucket in buckets(finite(tensors), limit):
                sizes.append([tensor.nbytes for _, tensor in bucket])
                yield bucket

        self._changed = False
        before, self._mixed = self._mixed, self._mixed_because("is under way")
        try:
            found = self._refit(sent(), digests)
        except BaseException as error:  # including errors of the `tensors` iterator
            self._mixed = before
            if self._refit_changed():
                self._mixed = self._mixed_because(f"failed ({one_line(error)})")
                if isinstance(error, EngineError):
                    raise MixedWeightsError(self._mixed) from error
                error.add_note(self._mixed)
            raise
        left = [*found["unwritten"], *found["stale_buffers"]]
        if left and not partial:
            self._mixed = self._mixed_because(f"left {len(left)} tensors unwritten: {listed(left)}")
            raise MixedWeightsError(self._mixed)
        self.version, self._mixed = self.version + 1, ""
        return RefitReport(
            tensors=sum(map(len, sizes)),
            nbytes=sum(map(sum, sizes)),
            seconds=time.perf_counter() - started,
            buckets=len(sizes),
            largest_bucket=max(map(sum, sizes), default=0),
            digests=found["digests"],
            unwritten=tuple(found["unwritten"]),
            stale_buffers=tuple(found["stale_buffers"]),
            version=self.version,
        )

    def _mixed_because(self, reason: str) -> str:
        return (
            f"{self.name} has parts of version {self.version} of the weights and parts of version {self.version + 1}, "
            f"whose refit {reason}. It raises on every call until a refit with all weights succeeds: refit it again, "
            "or restart it if it has died"
        )

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        """Implement `refit`. Returns `digests`, `unwritten` and `stale_buffers` of the report."""
        raise EngineError(f"{self.name} does not support new weights")

    def _refit_changed(self) -> bool:
        """Return True if the failed `_refit` changed a weight or may have changed one."""
        return self._changed

    def note_weights(self) -> bool:
        """Record the engine's current weights for `unchanged_weights`. Return False if some cannot be read."""
        return False

    def unchanged_weights(self) -> list[str]:
        """Return names of weights that a refit wrote but that still have some or all of their recorded values."""
        return []

    def module_calls(self, tokens: Tokens, *, decode_last: bool = False) -> dict[str, ModuleCall]:
        """Record the inputs and outputs of each module for one sequence.

        Args:
            tokens: Token ids. Use a short sequence, because all tensors are kept in memory.
            decode_last: Whether to compute the last token in a separate decoding step. The recorded tensors are then
                those of that step.

        Returns:
            A dictionary from module name to `ModuleCall`.

        Raises:
            EngineError: If the engine cannot record modules.
        """
        raise EngineError(f"the modules of {self.name} cannot be recorded")

    def close(self) -> None:
        """Free the engine's memory and processes."""

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_whole_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of an engine so that it raises if the weights are of two versions."""

    @wraps(method)
    def answer(self: Engine, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._mixed:
                raise MixedWeightsError(self._mixed)
            return method(self, *args, **kwargs)

    return answer


def buckets(tensors: Iterable[NamedTensor], max_bytes: int | None) -> Iterator[list[NamedTensor]]:
    """Group tensors into buckets of `max_bytes` at most, see `grouped`; a larger tensor has a bucket to itself."""
    return grouped((((name, tensor), tensor.nbytes) for name, tensor in tensors), max_bytes)


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Convert lists of different lengths to one fp64 tensor padded with NaN, `(batch, max_length)`."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=math.nan)


def final_scores(engine: Engine, tokens: torch.Tensor, count: int, sampling: Sampling, **options: Any) -> torch.Tensor:
    """Score the last `count` tokens of `tokens` `(batch, seq_len)`. Returns fp64 `(batch, count)`."""
    scores = engine.score(tokens.tolist(), sampling, last=count, **options)
    return torch.tensor([row[-count:] for row in scores], dtype=torch.float64)
