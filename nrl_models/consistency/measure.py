"""Measure one cell: generate once, then let every side score the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.dtypes import dtype_name
from nrl_models.consistency.cells import Cell, Settings
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.scores import final_scores, padded
from nrl_models.logprobs.metrics import ConsistencyMetrics, consistency_metrics
from nrl_models.parity.noise import rounded_otherwise

NOISE_SEQUENCES = (2, 8)
"""Minimum and maximum number of sequences for the noise floor, which varies by half between sequences. `NOISE_TOKENS`
limits the number in between."""

NOISE_TOKENS = 8_000

MAX_OUTSIDE = 0.01
"""Maximum share of sampled tokens that top-k and top-p exclude in another forward. Rounding decides at their limits."""


class Comparison(StrEnum):
    """Which log-probabilities are compared."""

    DECODE = "decode"
    """Trainer with the engine as it sampled: the guide's number."""
    PREFILL = "prefill"
    """Trainer with the engine's prefill of the same tokens."""
    WITHIN_ENGINE = "within_engine"
    """The engine's prefill with its own decoding."""
    NOISE = "noise"
    """A model in the lower precision of the two with itself under other roundings: the noise floor."""
    STRICT = "strict"
    """Trainer with engine, on tokens sampled by the trainer."""
    SECOND = "second trainer"
    """Second trainer with the engine as it sampled."""


SCORED = (Comparison.PREFILL, Comparison.STRICT)
"""Comparisons with log-probabilities of tokens that the engine did not sample in the same forward."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One repeat of a cell: the same tokens, scored by all sides. All arrays have one row per sequence.

    Args:
        tokens: Prompt and continuation, `(batch, seq_len)` int64.
        prompt_length: Number of tokens of the prompt.
        decode: Log-probabilities of the engine while sampling, `(batch, generated)`. This and all following are fp64.
        prefill: Log-probabilities of the engine's prefill; None if it cannot score.
        trainer: Log-probabilities of the trainer.
        rounded: Log-probabilities with other rounding for the first sequences. From the trainer, or from transformers'
            model in the engine's precision if that is lower.
        unrounded: Baseline of `rounded`; None if it is `trainer`.
        noise_dtype: Precision of `rounded` and `unrounded`.
        strict_tokens: Tokens sampled by the trainer, if requested.
        strict_trainer, strict_engine: Log-probabilities of `strict_tokens`.
        second: Log-probabilities of `tokens` from the second trainer; None if there is none.
    """

    tokens: torch.Tensor
    prompt_length: int
    decode: torch.Tensor
    prefill: torch.Tensor | None = None
    trainer: torch.Tensor
    rounded: torch.Tensor
    unrounded: torch.Tensor | None = None
    noise_dtype: torch.dtype = torch.float32
    strict_tokens: torch.Tensor | None = None
    strict_trainer: torch.Tensor | None = None
    strict_engine: torch.Tensor | None = None
    second: torch.Tensor | None = None

    @property
    def noise_sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two sets of log-probabilities that differ by the noise floor."""
        return self.rounded, self.trainer[: len(self.rounded)] if self.unrounded is None else self.unrounded

    @cached_property
    def metrics(self) -> dict[Comparison, ConsistencyMetrics]:
        """Metrics of each comparison whose two sides are known."""
        sides = {
            Comparison.DECODE: (self.trainer, self.decode),
            Comparison.PREFILL: (self.trainer, self.prefill),
            Comparison.WITHIN_ENGINE: (self.prefill, self.decode),
            Comparison.NOISE: self.noise_sides,
            Comparison.STRICT: (self.strict_trainer, self.strict_engine),
            Comparison.SECOND: (self.second, self.decode),
        }
        return {
            name: consistency_metrics(first, second)
            for name, (first, second) in sides.items()
            if first is not None and second is not None
        }

    def save(self, file: Path) -> None:
        """Write the measurement to a safetensors file. Its directory is created."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: value.contiguous() for name, value in values.items() if isinstance(value, torch.Tensor)}
        metadata = {"prompt_length": str(self.prompt_length), "noise_dtype": dtype_name(self.noise_dtype)}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, safetensors.torch.save(arrays, metadata))

    @classmethod
    def load(cls, file: Path) -> Measurement:
        """Read what `save` wrote.

        Raises:
            OSError, SafetensorError: The file does not exist or is damaged.
        """
        with safetensors.safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            arrays: dict[str, Any] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        noise_dtype = getattr(torch, metadata["noise_dtype"])
        return cls(prompt_length=int(metadata["prompt_length"]), noise_dtype=noise_dtype, **arrays)


def order_by_error(trainer: torch.Tensor, *engine: torch.Tensor) -> list[int]:
    """Return indices of sequences, ordered by their largest difference from any of the engine's scores."""
    difference = torch.stack([(trainer - scores).abs().nan_to_num(nan=math.inf) for scores in engine]).amax(0)
    return difference.mean(1).argsort(descending=True).tolist()


Arrays = dict[str, torch.Tensor]


@dataclass
class Meter:
    """Measures cells with an engine and a trainer, and saves the results in a store.

    Args:
        engine: The engine under test.
        trainer: The trainer's model as an engine.
        prompts: Creates prompts.
        settings: Settings of the check.
        store: Saves results, and loads existing ones; None saves nothing.
        references: Creates the model for the noise floor if the engine's precision is lower than the trainer's.
            Otherwise, or without it, the trainer is used.
        second: A second trainer to compare with the engine; None if there is none.
    """

    engine: Engine
    trainer: HFEngine
    prompts: Prompts
    settings: Settings
    store: Store | None = None
    references: References | None = None
    second: Engine | None = None

    @property
    def noise_dtype(self) -> torch.dtype:
        """Precision of the noise floor: the lower one of both sides, or the trainer's if the engine's is unknown."""
        dtypes = [self.trainer.model.dtype]
        if self.references is not None and (dtype := self.engine.capabilities().dtype) is not None:
            dtypes.append(dtype)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def measure(self, cell: Cell, repeat: int = 0, note: Callable[[str], None] = lambda step: None) -> Measurement:
        """Measure one repeat of a cell, or the missing part of it.

        Args:
            cell: The cell.
            repeat: Number of the repeat, from 0.
            note: Called with the name of each step.

        Raises:
            EngineError: If the engine failed. Completed measurements are saved.
            ConsistencyError: If no prompts can be created.
        """
        seed = self.settings.seed + 1_000_003 * repeat
        steps: dict[str, tuple[str, Callable[[], Arrays]]] = {
            "decode": ("generating", lambda: self._sample(self.engine, cell, seed)),
            "prefill": ("engine scores", lambda: {"prefill": self._scores(self.engine, arrays["tokens"], cell)}),
            "trainer": ("trainer scores", lambda: {"trainer": self._scores(self.trainer, arrays["tokens"], cell)}),
            "rounded": ("noise floor", lambda: self._rounded(arrays["tokens"], cell)),
        }
        if (second := self.second) is not None:
            steps["second"] = ("second trainer", lambda: {"second": self._scores(second, arrays["tokens"], cell)})
        if self.settings.strict:
            steps["strict_engine"] = ("trainer samples", lambda: self._strict(cell, seed))
        arrays = self.store.load(cell, repeat) if self.store else {}
        for result, (step_name, step) in steps.items():
            if result not in arrays:
                note(step_name)
                arrays |= step()
                if self.store:
                    self.store.save(cell, repeat, arrays)
        present = {name: array for name, array in arrays.items() if len(array)}
        return Measurement(prompt_length=self._prompt_length(cell), noise_dtype=self.noise_dtype, **present)

    def _prompt_length(self, cell: Cell) -> int:
        return cell.length - self.settings.generated(cell)

    def _sample(self, engine: Engine, cell: Cell, seed: int, offset: int = 0) -> Arrays:
        """Sample continuations of the prompts of `seed`, with the random numbers of `seed + offset`."""
        prompts = self.prompts.make(cell, self._prompt_length(cell), seed)
        generated, sampling = self.settings.generated(cell), self.settings.sampling_of(cell)
        samples = engine.generate(prompts, sampling, max_new_tokens=generated, seed=seed + offset)
        return {
            "tokens": torch.tensor([sample.sequence for sample in samples]),
            "decode": padded([sample.logprobs for sample in samples]),
        }

    def _rounded(self, tokens: torch.Tensor, cell: Cell) -> Arrays:
        fewest, most = NOISE_SEQUENCES
        tokens = tokens[: max(fewest, min(most, NOISE_TOKENS // tokens.shape[1]))]
        party, arrays = self.trainer, {}
        if self.noise_dtype != self.trainer.model.dtype:
            assert self.references is not None
            party = HFEngine(self.references.model(self.noise_dtype), "reference", max_length=tokens.shape[1])
            arrays["unrounded"] = self._scores(party, tokens, cell)
        with rounded_otherwise(party.model):
            return arrays | {"rounded": self._scores(party, tokens, cell, full_logits=True)}

    def _strict(self, cell: Cell, seed: int) -> Arrays:
        tokens = self._sample(self.trainer, cell, seed, offset=1)["tokens"]
        return {
            "strict_tokens": tokens,
            "strict_trainer": self._scores(self.trainer, tokens, cell),
            "strict_engine": self._scores(self.engine, tokens, cell),
        }

    def _scores(self, engine: Engine, tokens: torch.Tensor, cell: Cell, **options: bool) -> torch.Tensor:
        generated, sampling = self.settings.generated(cell), self.settings.sampling_of(cell)
        known = engine.capabilities()
        if not known.score or not (known.processed_scores or sampling.is_identity):
            return torch.zeros(0, generated, dtype=torch.float64)  # the engine cannot score these tokens
        return final_scores(engine, tokens, generated, sampling, **options)


def not_finite(comparisons: Mapping[Comparison, Sequence[ConsistencyMetrics]], *, truncates: bool) -> list[str]:
    """Return problems with log-probabilities that are not finite.

    Args:
        comparisons: Metrics of each comparison, by repeat.
        truncates: Whether the sampling excludes tokens, by top-k or top-p.
    """
    problems = []
    for name, repeats in comparisons.items():
        if nan := sum(metrics.nan for metrics in repeats):
            problems.append(f"{nan} log-probabilities of {name} are NaN")
        outside = sum(metrics.trainer_infinite for metrics in repeats)
        infinite = sum(metrics.engine_infinite for metrics in repeats)
        allowed = MAX_OUTSIDE * (outside + infinite + sum(metrics.tokens for metrics in repeats))
        if infinite > (allowed if truncates and name in SCORED else 0):
            problems.append(f"{infinite} log-probabilities of {name} are infinite in the engine")
        if outside and not truncates:
            problems.append(f"{outside} tokens of {name} have probability 0 in the trainer, without top-k and top-p")
        elif outside > allowed:
            problems.append(f"{outside} tokens of {name} are excluded by the trainer's top-k and top-p")
    return problems
