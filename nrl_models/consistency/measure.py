"""Measuring one cell: generate once, then score the same tokens by everybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nrl_models.consistency.cells import Cell, Settings
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.store import Store
from nrl_models.engines.base import Engine, Sample, padded
from nrl_models.engines.hf import HFEngine
from nrl_models.logprobs.metrics import ConsistencyMetrics, consistency_metrics
from nrl_models.parity.noise import rounded_otherwise

NOISE_SEQUENCES = 2
"""On how many sequences of a batch the noise floor is measured."""


@dataclass(frozen=True)
class Measurement:
    """One repeat of a cell: the same tokens, scored by everybody. All arrays have a row for each sequence.

    Args:
        tokens: `(sequences, length)` int64; prompt and continuation.
        prompt_length: tokens of the prompt.
        decode: `(sequences, generated)` fp64, like all that follow: log-probabilities from the engine as it sampled.
        prefill: from the engine, given the same tokens; None if it cannot tell.
        trainer: from the trainer.
        rounded: from the trainer rounding otherwise, for the first sequences: the noise floor.
        strict_tokens: what the trainer sampled, if it was asked to.
        strict_trainer, strict_engine: log-probabilities of that.
    """

    tokens: torch.Tensor
    prompt_length: int
    decode: torch.Tensor
    prefill: torch.Tensor | None
    trainer: torch.Tensor
    rounded: torch.Tensor
    strict_tokens: torch.Tensor | None = None
    strict_trainer: torch.Tensor | None = None
    strict_engine: torch.Tensor | None = None

    @property
    def against_decode(self) -> ConsistencyMetrics:
        """Trainer against what the engine sampled with: the number of the guide."""
        return consistency_metrics(self.trainer, self.decode)

    @property
    def against_prefill(self) -> ConsistencyMetrics | None:
        """Trainer against the engine's prefill."""
        return None if self.prefill is None else consistency_metrics(self.trainer, self.prefill)

    @property
    def within_engine(self) -> ConsistencyMetrics | None:
        """The engine's prefill against its own decoding."""
        return None if self.prefill is None else consistency_metrics(self.prefill, self.decode)

    @property
    def noise(self) -> ConsistencyMetrics:
        """The trainer against itself, rounding otherwise."""
        return consistency_metrics(self.rounded, self.trainer[: len(self.rounded)])

    @property
    def strict(self) -> ConsistencyMetrics | None:
        """Trainer against engine on what the trainer sampled."""
        if self.strict_trainer is None or self.strict_engine is None:
            return None
        return consistency_metrics(self.strict_trainer, self.strict_engine)


Arrays = dict[str, torch.Tensor]


class Meter:
    """Measures cells with an engine and a trainer, and keeps the results in a store.

    Args:
        engine: the engine under test.
        trainer: the model that trains, as an engine.
        prompts: where prompts come from.
        settings: what to measure.
        store: where results go, and come from if they are there; None keeps nothing.
    """

    def __init__(
        self, engine: Engine, trainer: HFEngine, prompts: Prompts, settings: Settings, store: Store | None = None
    ) -> None:
        self.engine, self.trainer = engine, trainer
        self.prompts, self.settings, self.store = prompts, settings, store

    def measure(self, cell: Cell, repeat: int = 0, note: Callable[[str], None] = lambda step: None) -> Measurement:
        """Measure one repeat of a cell, or what is missing of it.

        Args:
            cell: which.
            repeat: counted from 0.
            note: told what is being done, in a word.

        Raises:
            EngineError: the engine failed; what was measured before is kept.
            ConsistencyError: no prompts can be made.
        """
        seed = self.settings.seed + 1_000_003 * repeat
        steps: dict[str, Callable[[Cell, int, Arrays], Arrays]] = {
            "decode": self._generate,
            "prefill": self._score_by_engine,
            "trainer": self._score_by_trainer,
            "rounded": self._score_by_trainer_rounding_otherwise,
        }
        if self.settings.strict:
            steps["strict_engine"] = self._sample_from_trainer
        arrays = self.store.load(cell, repeat) if self.store else {}
        for result, step in steps.items():
            if result not in arrays:
                note(_WORDS[result])
                arrays |= step(cell, seed, arrays)
                if self.store:
                    self.store.save(cell, repeat, arrays)
        return measurement(arrays, cell.length - self.settings.generated(cell))

    def _prompts(self, cell: Cell, seed: int) -> list[list[int]]:
        return self.prompts.make(cell, cell.length - self.settings.generated(cell), seed)

    def _generate(self, cell: Cell, seed: int, arrays: Arrays) -> Arrays:
        generated = self.settings.generated(cell)
        samples = self.engine.generate(
            self._prompts(cell, seed), self.settings.sampling_of(cell), max_new_tokens=generated, seed=seed
        )
        return _arrays(samples, generated)

    def _score_by_engine(self, cell: Cell, seed: int, arrays: Arrays) -> Arrays:
        return {"prefill": self._scores(self.engine, arrays["tokens"], cell)}

    def _score_by_trainer(self, cell: Cell, seed: int, arrays: Arrays) -> Arrays:
        return {"trainer": self._scores(self.trainer, arrays["tokens"], cell)}

    def _score_by_trainer_rounding_otherwise(self, cell: Cell, seed: int, arrays: Arrays) -> Arrays:
        some = arrays["tokens"][:NOISE_SEQUENCES].tolist()
        generated = self.settings.generated(cell)
        with rounded_otherwise(self.trainer.model):
            scores = self.trainer.score(some, self.settings.sampling_of(cell), last=generated, full_logits=True)
        return {"rounded": padded([row[-generated:] for row in scores], generated)}

    def _sample_from_trainer(self, cell: Cell, seed: int, arrays: Arrays) -> Arrays:
        generated = self.settings.generated(cell)
        samples = self.trainer.generate(
            self._prompts(cell, seed), self.settings.sampling_of(cell), max_new_tokens=generated, seed=seed + 1
        )
        tokens = _arrays(samples, generated)["tokens"]
        return {
            "strict_tokens": tokens,
            "strict_trainer": self._scores(self.trainer, tokens, cell),
            "strict_engine": self._scores(self.engine, tokens, cell),
        }

    def _scores(self, engine: Engine, tokens: torch.Tensor, cell: Cell) -> torch.Tensor:
        generated, sampling = self.settings.generated(cell), self.settings.sampling_of(cell)
        known = engine.capabilities()
        if not known.score or not (known.processed_scores or sampling.is_identity):
            return torch.zeros(0, generated, dtype=torch.float64)  # it cannot tell
        scores = engine.score(tokens.tolist(), sampling, last=generated)
        return padded([row[-generated:] for row in scores], generated)


_WORDS = {
    "decode": "generating",
    "prefill": "engine scores",
    "trainer": "trainer scores",
    "rounded": "noise floor",
    "strict_engine": "trainer samples",
}
"""What the table says while a step runs."""


def _arrays(samples: list[Sample], generated: int) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([sample.sequence for sample in samples]),
        "decode": padded([sample.logprobs for sample in samples], generated),
    }


def measurement(arrays: dict[str, torch.Tensor], prompt_length: int) -> Measurement:
    """A measurement from what a store holds of it."""

    def present(name: str) -> torch.Tensor | None:
        array = arrays.get(name)
        return None if array is None or not len(array) else array

    return Measurement(
        tokens=arrays["tokens"],
        prompt_length=prompt_length,
        decode=arrays["decode"],
        prefill=present("prefill"),
        trainer=arrays["trainer"],
        rounded=arrays["rounded"],
        strict_tokens=present("strict_tokens"),
        strict_trainer=present("strict_trainer"),
        strict_engine=present("strict_engine"),
    )
