"""The interface of inference engines: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nrl_models.common.state_dict.buckets import grouped_tensors
from nrl_models.common.trust.servers import VLLMS
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
from nrl_models.engines.guarded_calls import GuardedCalls
from nrl_models.engines.input_checks import (
    media_inputs,
    plain_tokens,
    require_lengths,
    require_limits,
    require_one_each,
    require_sampling,
)
from nrl_models.engines.transfer.sent_tensors import finite
from nrl_models.errors import EngineError, MixedWeightsError, listed, one_line, shown
from nrl_models.logprobs.sampling import Sampling


class Engine(GuardedCalls):
    """Base class of inference engines. Use it as a context manager to close the engine at the end.

    Its methods are wrapped, see `GuardedCalls`.

    Attributes:
        name: Engine name in reports.
        bucket_bytes: Default bucket size of refits in bytes. None sends all tensors in one bucket.
        version: Version of the weights: 0 at the start, incremented by each refit.
        sampled_per_score: Number of tokens that the engine samples after each sequence it scores, which need room.
    """

    name: str
    bucket_bytes: int | None = None
    version: int = 0
    sampled_per_score: int = 0
    _never_written: frozenset[str] = frozenset()
    """While the weights are of two versions: tensors that no refit since the last complete version has written."""
    _changed: bool = False
    """Whether the last `_refit` changed a weight, or may have changed one."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, version={self.version})"

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
        `finish_reason` is then `placeholder`. With videos and audio it ends at their tokens.

        Args:
            prompts: Token ids of each prompt.
            sampling: Temperature and truncation.
            max_new_tokens: Maximum number of new tokens; the exact number if `ignore_end`.
            seed: Random seed. Each prompt gets a separate seed derived from it.
            ignore_end: Whether to continue after an end-of-text token.
            beyond_limit: Skip the check of lengths, so that the engine itself has to stop at its length limit.
            model_inputs: Keyword arguments of the model's forward for each prompt (batch size 1), in addition to the
                token ids. Empty for a prompt without images. `input_ids` and `attention_mask` of a processor are left
                out, so `Sample.model_inputs` does not have them.
            images: PIL images of each prompt, in the order of their placeholders. `Sample.prompt` then has the token
                ids from the engine's processor.

        Raises:
            EngineError: If a prompt is too long, `max_new_tokens` is below 1, `model_inputs` are those of other token
                ids or have padding, or the engine does not support the temperature or images. Also if the engine fails
                or ends a sequence early.
        """
        require_sampling(self, sampling)
        require_limits(self, sampling, max_new_tokens)
        if not is_integer(seed, 1 - 2**63, 2**63 - 1):
            raise EngineError(f"seed={shown(seed)}: expected a whole number of at most 63 bits")
        require_lengths(self, prompts, 0 if beyond_limit else max_new_tokens)
        require_one_each(prompts, model_inputs=model_inputs, images=images)
        if not (prompts := plain_tokens(prompts)):
            return []
        more: dict[str, Any] = {}
        if model_inputs is not None and any(model_inputs := media_inputs(self, prompts, model_inputs)):
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
            more |= {"images": list(images)}
        samples = self._generate(
            prompts, sampling, max_new_tokens=max_new_tokens, seed=seed, ignore_end=ignore_end, **more
        )
        if "model_inputs" in more:
            samples = [
                replace(sample, model_inputs=inputs)
                for sample, inputs in zip(samples, more["model_inputs"], strict=True)
            ]
        require_complete(self.name, samples, max_new_tokens, ignore_end=ignore_end, beyond_limit=beyond_limit)
        return samples

    def _generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        """Implement `generate` for prompts that fit. Engines with images also take `model_inputs` or `images`."""
        raise NotImplementedError

    def score(
        self, sequences: Sequence[Tokens], sampling: Sampling, *, last: int | None = None, **options: Any
    ) -> list[list[float]]:
        """Return the log-probability of each token given the tokens before it, computed in one prefill.

        The value for the first token of each sequence is NaN.

        Args:
            sequences: Token ids of each sequence.
            sampling: Temperature and truncation applied to the logits before the softmax.
            last: Number of tokens at the end to score; the others may be NaN. All tokens by default.
            options: Options of the engine, see its `_score`.

        Raises:
            EngineError: If the engine cannot score tokens, a sequence is too long, or the engine fails.
        """
        require_sampling(self, sampling)
        if last is not None and not is_integer(last, 0):
            raise EngineError(f"last={shown(last)}: expected a number of tokens, or None for all")
        require_lengths(self, sequences, self.sampled_per_score)
        require_one_each(sequences, **{name: options.get(name) for name in ("model_inputs", "images")})
        if not (sequences := plain_tokens(sequences)):
            return []
        if options.get("model_inputs") is not None:
            options["model_inputs"] = media_inputs(self, sequences, options["model_inputs"])
        return self._score(sequences, sampling, last=last, **options)

    def _score(self, sequences: list[list[int]], sampling: Sampling, *, last: int | None) -> list[list[float]]:
        """Implement `score` for sequences that fit, at least one. Engines may take further options."""
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
            tensors: Pairs of hub name and tensor, as from `StateDictAdapter.iter_export`. A generator must not write
                to a tensor that it yielded. Only writes that torch counts raise an error (`copy_`, but not
                `.data.copy_`, NumPy or `torch.distributed.broadcast`).
            bucket_bytes: Maximum bytes per bucket; a larger tensor gets a separate bucket. Default:
                `self.bucket_bytes`.
            digests: Whether to compute `RefitReport.digests`.
            partial: Whether parameters and persistent buffers may keep their old values if nothing is written to
                them. By default this raises `MixedWeightsError`, because the weights would be of two versions.

        Raises:
            MixedWeightsError: If only some of the weights were written. If the `tensors` iterator raised, its error
                is re-raised with this message as a note.
            EngineError: If the engine does not support refits or rejects a tensor (NaN or infinite values, another
                dtype or shape, a duplicate name), or the iterator changed a tensor after it had yielded it, as with a
                reused buffer. The engine keeps its old weights.
        """
        if bucket_bytes is not None and type(bucket_bytes) is not int:
            raise EngineError(f"bucket_bytes={bucket_bytes!r}: expected a whole number of bytes, or None")
        with self._lock:
            self.require_open()
            return self._refit_whole(tensors, bucket_bytes, digests, partial)

    def _refit_whole(
        self, tensors: Iterable[NamedTensor], bucket_bytes: int | None, digests: bool, partial: bool
    ) -> RefitReport:
        """Implement `refit`. The caller holds the lock."""
        started = time.perf_counter()
        sizes: list[list[int]] = []

        def sent() -> Iterator[list[NamedTensor]]:
            limit = self.bucket_bytes if bucket_bytes is None else bucket_bytes
            for bucket in grouped_tensors(finite(tensors), limit):
                sizes.append([tensor.nbytes for _, tensor in bucket])
                yield bucket

        self._changed = False
        before, self._mixed = self._mixed, self._mixed_because("is under way")
        try:
            report = self._refit(sent(), digests)
        except BaseException as error:  # including errors of the `tensors` iterator
            self._mixed = before
            if self._refit_changed():
                self._mixed, self._never_written = self._mixed_because(f"failed ({one_line(error)})"), frozenset()
                if isinstance(error, EngineError):
                    raise MixedWeightsError(self._mixed) from error
                error.add_note(self._mixed)
            raise
        left = [*report["unwritten"], *report["stale_buffers"]]
        of_another_refit = before and not self._never_written.issuperset(left)
        if left and (of_another_refit or not partial):
            self._never_written = self._never_written.intersection(left) if before else frozenset(left)
            self._mixed = self._mixed_because(f"left {len(left)} tensors unwritten: {listed(left)}")
            raise MixedWeightsError(self._mixed)
        self.version, self._mixed = self.version + 1, ""
        return RefitReport(
            tensors=sum(map(len, sizes)),
            nbytes=sum(map(sum, sizes)),
            seconds=time.perf_counter() - started,
            buckets=len(sizes),
            largest_bucket=max(map(sum, sizes), default=0),
            digests=report["digests"],
            unwritten=tuple(report["unwritten"]),
            stale_buffers=tuple(report["stale_buffers"]),
            version=self.version,
        )

    def _mixed_because(self, reason: str) -> str:
        return (
            f"{self.name} has parts of version {self.version} of the weights and parts of version {self.version + 1}, "
            f"whose refit {reason}. It raises on every call until a refit with all weights succeeds: refit it again "
            "with weights that it accepts, or restart it if it has died"
        )

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        """Implement `refit`. Returns `digests`, `unwritten` and `stale_buffers` of the report."""
        raise EngineError(f"{self.name} does not support new weights")

    def _refit_changed(self) -> bool:
        """Return True if the failed `_refit` changed a weight or may have changed one."""
        return self._changed

    def use_adapter(self, folder: str | Path | None) -> None:
        """Serve a LoRA adapter without merging it, see `VLLMEngine.use_adapter`.

        Args:
            folder: Directory written by PEFT's `save_pretrained`. None disables the adapter.

        Raises:
            EngineError: If the engine does not serve adapters, or not this one.
        """
        raise EngineError(
            f"{self.name} does not serve adapters here: expected {' or '.join(VLLMS)} in this process (without "
            "python=), started with enable_lora=True; or refit this engine with merged weights, "
            "nrl_models.export_adapter(model).iter_export(model)"
        )

    def note_weights(self) -> bool:
        """Record the engine's current weights for `unchanged_weights`.

        Returns False if that may miss an unchanged weight or part of a fused weight, because it cannot be read.
        """
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
            EngineError: If the engine cannot record modules, or `decode_last` is set for a single token.
        """
        raise EngineError(f"the modules of {self.name} cannot be recorded")
