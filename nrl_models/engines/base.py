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
from nrl_models.engines.engine_types import (
    AT_PLACEHOLDER,
    Capabilities,
    ModuleCall,
    NamedTensor,
    RefitReport,
    Sample,
    Tokens,
)
from nrl_models.errors import EngineError, MixedWeightsError, itemised, listed, one_line
from nrl_models.logprobs.sampling import Sampling

_RANDOM = ("start", "_generate", "score", "_refit", "module_calls", "close")
"""Methods in which an engine may seed or draw random numbers."""

_ANSWERS = ("_generate", "score", "module_calls")
"""Methods that compute with the weights."""


class Engine(AbstractContextManager["Engine"]):
    """Base of all engines. They are context managers: leaving closes them.

    The methods in `_RANDOM` leave the caller's random states as they were. Those in `_ANSWERS` raise a
    `MixedWeightsError` if the tensors of a refit under way call them, and after a refit that left parts of two
    versions. A lock serializes them and refits: a call from another thread waits for the call before it.

    Attributes:
        name: its name in reports.
        bucket_bytes: for refits whose caller gives none; None sends everything at once.
        version: the number of the weights it has: 0 for those it started with, then that of the last refit.
    """

    name: str
    bucket_bytes: int | None = None
    version: int = 0
    _mixed: str = ""
    """Why it answers nothing; empty if its weights are of one version."""
    _changed: bool = False
    """Whether the last `_refit` changed a weight, or may have."""
    _lock: RLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give the engine its lock: subclasses need not call `super().__init__`."""
        engine = super().__new__(cls)
        engine._lock = RLock()
        return engine

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
        """What this engine, as it was started, can do."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Version and settings, for reports."""
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

        Images come in one of two forms, and `capabilities()` says which an engine takes: as a processor's
        `model_inputs`, with the token ids that it made; or as they are, with token ids in which each still has the one
        placeholder of the text (`images`). A reply with images also ends before a token that stands for an image
        (`finish_reason` is `placeholder`), which nothing could read.

        Args:
            prompts: token ids.
            sampling: how.
            max_new_tokens: tokens at most, and exactly if `ignore_end`.
            seed: of the random numbers; each prompt has its own.
            ignore_end: whether to continue after an end-of-text token.
            beyond_limit: whether to ask for more tokens than fit, so that the engine has to stop by itself.
            model_inputs: for each prompt what a processor makes of its images, beside the token ids: keywords of the
                model's forward for a batch of one, none for a prompt without images.
            images: for each prompt its images (PIL), in the order of their placeholders. `Sample.prompt` is then what
                the engine's processor made of the prompt.

        Raises:
            EngineError: a prompt is too long, `max_new_tokens` is below 1, the engine cannot sample at that
                temperature, or the engine fails, ends a sequence early or takes no images.
        """
        _require_sampling(self, sampling, max_new_tokens)
        require_lengths(self, prompts, 0 if beyond_limit else max_new_tokens)
        more: dict[str, Any] = {}
        if model_inputs is not None and any(model_inputs):
            if not self.capabilities().images:
                raise EngineError(
                    f"{self.name} takes token ids alone here, and {sum(map(bool, model_inputs))} of {len(prompts)} "
                    "prompts come with images. hf-generate takes them, with a model that does"
                )
            more = {"model_inputs": model_inputs}
        if images is not None and any(images):
            if not self.capabilities().raw_images:
                raise EngineError(
                    f"{self.name} takes no raw images here, and {sum(map(bool, images))} of {len(prompts)} prompts "
                    "have some. vllm takes them, with a model that does and the checkpoint's processor"
                )
            more |= {"images": images}
        samples = self._generate(
            prompts, sampling, max_new_tokens=max_new_tokens, seed=seed, ignore_end=ignore_end, **more
        )
        if "model_inputs" in more:
            samples = [
                replace(sample, model_inputs=own) for sample, own in zip(samples, more["model_inputs"], strict=True)
            ]
        lengths = [len(sample.tokens) for sample in samples]
        if max(lengths, default=0) > max_new_tokens:
            raise EngineError(f"{self.name} generated {max(lengths)} tokens: {max_new_tokens} were asked for at most")
        short = [index for index, length in enumerate(lengths) if length != max_new_tokens]
        at_images = [index for index in short if samples[index].finish_reason == AT_PLACEHOLDER]
        if at_images and ignore_end:
            raise EngineError(
                f"{self.name} sampled the placeholder of an image in sequences {at_images}, where a reply ends: "
                "with images, pass ignore_end=False"
            )
        if short and ignore_end and not beyond_limit:
            raise EngineError(
                f"{self.name} generated {[lengths[index] for index in short]} tokens for sequences {short}, and "
                f"{max_new_tokens} were asked for, past the end of text: it does not honour `ignore_eos`"
            )
        return samples

    def _generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        """Implements `generate` for prompts that fit; of one that takes images also with `model_inputs` or `images`."""
        raise NotImplementedError

    def score(self, sequences: Sequence[Tokens], sampling: Sampling, *, last: int | None = None) -> list[list[float]]:
        """Log-probability of each token of each sequence given those before it, computed in one prefill.

        That of the first token of a sequence is NaN.

        Args:
            sequences: token ids.
            sampling: how logits are processed before the softmax.
            last: how many tokens at the end to score; the others may be NaN. All by default.

        Raises:
            EngineError: the engine lacks the capability, a sequence is too long, or the engine fails.
        """
        raise EngineError(f"{self.name} gives no log-probabilities of given tokens")

    def refit(
        self,
        tensors: Iterable[NamedTensor],
        *,
        bucket_bytes: int | None = None,
        digests: bool = True,
        partial: bool = False,
    ) -> RefitReport:
        """Give the engine new weights. Afterwards it has all of them, or the old ones, or it answers nothing.

        Args:
            tensors: by hub name, as `StateDictAdapter.iter_export` yields them.
            bucket_bytes: bytes sent at a time at most (a larger tensor goes alone); the engine's own by default.
            digests: whether to compute `RefitReport.digests`.
            partial: whether parameters and persistent buffers that nothing is written to may keep what they have.
                By default that is an error: the engine would compute with parts of two versions.

        Raises:
            MixedWeightsError: something was written, but not everything. The engine answers nothing until a refit
                succeeds. Where what yields the tensors failed, its own error says so in a note.
            EngineError: the engine lacks the capability, or does not accept a tensor (NaN or infinite values, another
                dtype or shape, a name sent twice); it has the weights from before.
        """
        with self._lock:
            return self._refit_whole(tensors, bucket_bytes, digests, partial)

    def _refit_whole(
        self, tensors: Iterable[NamedTensor], bucket_bytes: int | None, digests: bool, partial: bool
    ) -> RefitReport:
        """Implements `refit` for the thread that has the lock."""
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
        except BaseException as error:  # also of the iterator that gives the tensors
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
            f"whose refit {reason}. It answers nothing until a refit with all weights succeeds: refit it again, or "
            "restart it if it has died"
        )

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        """Implements `refit`: gives the report's `digests`, `unwritten` and `stale_buffers`."""
        raise EngineError(f"{self.name} takes no new weights")

    def _refit_changed(self) -> bool:
        """Whether the `_refit` that has just failed changed a weight, or may have."""
        return self._changed

    def note_weights(self) -> bool:
        """Note the weights that the engine holds, for `unchanged_weights`. Return False if some cannot be read."""
        return False

    def unchanged_weights(self) -> list[str]:
        """Names of weights that a refit wrote, and that are in whole or in part as they were when they were noted."""
        return []

    def module_calls(self, tokens: Tokens, *, decode_last: bool = False) -> dict[str, ModuleCall]:
        """Inputs and outputs of each module, by module name, for one sequence.

        Args:
            tokens: the sequence; short ones are enough, since everything is kept.
            decode_last: whether to compute the last token in a step of its own, as in decoding; the tensors are then
                those of that step.

        Raises:
            EngineError: the engine lacks the capability.
        """
        raise EngineError(f"the modules of {self.name} cannot be recorded")

    def close(self) -> None:
        """Free what the engine holds."""

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_whole_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an engine that raises where the engine has parts of two versions of the weights."""

    @wraps(method)
    def answer(self: Engine, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._mixed:
                raise MixedWeightsError(self._mixed)
            return method(self, *args, **kwargs)

    return answer


def finite(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the tensors of a refit, each after a check of its values.

    Raises:
        EngineError: a tensor has NaN or infinite values, or its name came before.
    """
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise EngineError(f"{name} was sent twice in one refit: send each tensor once")
        seen.add(name)
        if not is_finite(tensor):
            values = tensor.detach().float()
            raise EngineError(
                f"{name} has {int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite values of "
                f"{values.numel():,}: the engine does not get such weights. Restore the trainer from a checkpoint with "
                "finite weights, and skip updates whose gradient norm is not finite"
            )
        yield name, tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite. One pass over the memory, without a temporary tensor.

    A single infinite value is finite here: it is a bound that is off, such as Gemma 4's `input_min`.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    values = tensor.detach()
    if values.numel() == 1:
        return not bool(values.isnan())
    if values.element_size() < 2:  # float8, which has no reductions
        values = values.float()
    return all(bool(bound.isfinite()) for bound in torch.aminmax(values))  # NaN propagates to both


def _require_sampling(engine: Engine, sampling: Sampling, max_new_tokens: int) -> None:
    """Require a temperature that the engine samples at, and at least one new token.

    Raises:
        EngineError: the temperature or the number of tokens is out of the engine's range.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise EngineError(f"max_new_tokens={max_new_tokens!r}: expected a whole number of at least 1")
    known = engine.capabilities()
    low, high = known.min_temperature, known.max_temperature
    if not sampling.greedy and not low <= sampling.temperature <= high:
        limit = f"from {low:g}" + (f" to {high:g}" if high < math.inf else "")
        raise EngineError(
            f"temperature={sampling.temperature:g}: {engine.name} samples at 0 (greedy) and at temperatures {limit}. "
            "Choose one of them, or another engine"
        )


def require_number(name: str, value: Any, *types: type) -> None:
    """Require that an engine's option, if given, is a positive number of one of the types.

    Raises:
        EngineError: it is not.
    """
    if value is not None and (type(value) not in types or not value > 0):
        raise EngineError(f"{name}={value!r}: expected a positive {'whole ' if float not in types else ''}number")


def require_lengths(engine: Engine, sequences: Sequence[Tokens], more: int = 0) -> None:
    """Require that every sequence, with `more` tokens, fits the engine, and that it knows every token.

    Raises:
        EngineError: lists all that do not fit.
    """
    known = engine.capabilities()
    problems = []
    for index, tokens in enumerate(sequences):
        if not tokens:
            problems.append(f"sequence {index} is empty")
        if known.max_length is not None and len(tokens) + more > known.max_length:
            problems.append(
                f"sequence {index} has {len(tokens)} tokens"
                + (f" and {more} more are asked for" if more else "")
                + f", and the engine takes {known.max_length}"
            )
        if known.vocabulary is not None and tokens and not 0 <= min(tokens) <= max(tokens) < known.vocabulary:
            problems.append(
                f"sequence {index} has token {max(tokens) if max(tokens) >= known.vocabulary else min(tokens)}, and "
                f"the vocabulary has {known.vocabulary}"
            )
    if problems:
        raise EngineError(f"{engine.name} cannot take this:", *itemised(problems))


def buckets(tensors: Iterable[NamedTensor], max_bytes: int | None) -> Iterator[list[NamedTensor]]:
    """Group tensors into buckets of `max_bytes` at most; a larger tensor has a bucket to itself."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if bucket and max_bytes is not None and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Lists of different lengths as one fp64 tensor, padded with NaN."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=math.nan)


def final_scores(engine: Engine, tokens: torch.Tensor, count: int, sampling: Sampling, **options: Any) -> torch.Tensor:
    """Log-probabilities an engine gives the last `count` of `tokens` `(sequences, length)`: fp64."""
    scores = engine.score(tokens.tolist(), sampling, last=count, **options)
    return torch.tensor([row[-count:] for row in scores], dtype=torch.float64)
