"""Measuring one cell: generate once, then have every party score the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch

from nrl_models.consistency.cells import Cell, Settings
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.engines.base import Engine, final_scores, padded
from nrl_models.engines.hf import HFEngine
from nrl_models.logprobs.metrics import ConsistencyMetrics, consistency_metrics
from nrl_models.parity.noise import rounded_otherwise

NOISE_SEQUENCES = (2, 8)
"""Sequences of a batch on which the noise floor is measured: from one to another it differs by half, so as many as
`NOISE_TOKENS` allows between these."""

NOISE_TOKENS = 8_000


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
    """Trainer with engine, on what the trainer sampled."""
    SECOND = "second trainer"
    """Second trainer with the engine as it sampled."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One repeat of a cell: the same tokens, scored by every party. All arrays have a row for each sequence.

    Args:
        tokens: `(sequences, length)` int64: prompt and continuation.
        prompt_length: tokens of the prompt.
        decode: `(sequences, generated)` fp64, like all that follow: log-probabilities from the engine as it sampled.
        prefill: from the engine, given the same tokens; None if it cannot score them.
        trainer: from the trainer.
        rounded: under other roundings, for the first sequences: from the trainer or, if the engine computes in a lower
            precision, from transformers' model in that.
        unrounded: what `rounded` is compared with; None if it is the trainer's.
        noise_dtype: the precision of both.
        strict_tokens: what the trainer sampled, if it was asked to.
        strict_trainer, strict_engine: log-probabilities of that.
        second: from the second trainer, of `tokens`; None if there is none.
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
        """The two sets of log-probabilities that differ by the noise floor."""
        return self.rounded, self.trainer[: len(self.rounded)] if self.unrounded is None else self.unrounded

    @cached_property
    def metrics(self) -> dict[Comparison, ConsistencyMetrics]:
        """The metrics of each comparison of which both sides are known."""
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


def order_by_error(trainer: torch.Tensor, *engine: torch.Tensor) -> list[int]:
    """The rows of the sequences, those that differ most from any of the engine's log-probabilities first."""
    difference = torch.stack([(trainer - scores).abs().nan_to_num(nan=math.inf) for scores in engine]).amax(0)
    return difference.mean(1).argsort(descending=True).tolist()


Arrays = dict[str, torch.Tensor]


@dataclass
class Meter:
    """Measures cells with an engine and a trainer, and keeps the results in a store.

    Args:
        engine: the engine under test.
        trainer: the model that trains, as an engine.
        prompts: where prompts come from.
        settings: what to measure.
        store: where results go, and come from if they are there; None keeps nothing.
        references: make the model on which the noise floor is measured, if the engine's precision is the lower; it is
            measured on the trainer otherwise, and without them.
        second: another trainer, which is compared with the engine as well; None if there is none.
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
        """The lower of the two precisions, that of the noise floor; the trainer's, if the engine's is unknown."""
        dtypes = [self.trainer.model.dtype]
        if self.references is not None and (dtype := self.engine.capabilities().dtype) is not None:
            dtypes.append(dtype)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def measure(self, cell: Cell, repeat: int = 0, note: Callable[[str], None] = lambda step: None) -> Measurement:
        """Measure one repeat of a cell, or what is missing of it.

        Args:
            cell: which.
            repeat: counted from 0.
            note: told the name of each step.

        Raises:
            EngineError: the engine failed; what was measured before is kept.
            ConsistencyError: no prompts can be made.
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
        """Continuations of the prompts of `seed`, sampled with the random numbers of `seed + offset`."""
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
            return torch.zeros(0, generated, dtype=torch.float64)  # it cannot score these
        return final_scores(engine, tokens, generated, sampling, **options)
