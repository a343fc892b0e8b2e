"""Questions of an RL step, their samples, and samples padded to a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from nrl_models.engines.engine_types import Sample
from nrl_models.errors import NonFiniteError, shown
from nrl_models.recipes.recipe import NonFinite


@dataclass(frozen=True, slots=True)
class Question:
    """A question for the model.

    Args:
        row: Row of the data set, for the reward.
        prompt: Token ids.
        model_inputs: Processor outputs for the row's images, see `Engine.generate`.
    """

    row: Any
    prompt: tuple[int, ...]
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples of different lengths, padded.

    Args:
        sequences: Token ids of each sample: prompt and completion.
        sampled: `(batch, max_length)`, True for tokens of completions, including the end-of-text token.
        logprobs: Log-probabilities of the engine, `(batch, max_length)`, fp64; zero if not `sampled`.
        model_inputs: Further model inputs of each sequence.
    """

    sequences: list[tuple[int, ...]]
    sampled: torch.Tensor
    logprobs: torch.Tensor
    model_inputs: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device | str = "cpu") -> SampleBatch:
        """Pad the inputs of the loss on the right."""
        sampled = [torch.tensor([False] * len(sample.prompt) + [True] * len(sample.tokens)) for sample in samples]
        logprobs = [
            torch.tensor([0.0] * len(sample.prompt) + list(sample.logprobs), dtype=torch.float64) for sample in samples
        ]
        return cls(
            [sample.sequence for sample in samples],
            pad_sequence(sampled, batch_first=True).to(device),
            pad_sequence(logprobs, batch_first=True).to(device),
            [sample.sequence_inputs for sample in samples],
        )

    @property
    def score(self) -> list[torch.Tensor]:
        """`sampled` without padding."""
        return [row[: len(sequence)] for row, sequence in zip(self.sampled, self.sequences, strict=True)]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Groups of samples with their rewards and advantages.

    Args:
        samples: All samples; those of a group are adjacent.
        advantages: Advantage of each sample, `(samples,)`.
        rewards: Rewards of all samples, including dropped groups, without penalties: `(questions, group_size)`.
        ended: Fraction of completions that the model ended.
        tokens: Mean number of tokens of a completion.
        skipped: Number of groups dropped because of values that are not finite.
    """

    samples: list[Sample]
    advantages: torch.Tensor
    rewards: torch.Tensor
    ended: float
    tokens: float
    skipped: int = 0


def finite_groups(
    samples: Sequence[Sample],
    group: int,
    on_non_finite: NonFinite,
    values: Mapping[str, torch.Tensor],
    rows: Sequence[Any] = (),
) -> torch.Tensor:
    """Find the groups without NaN and infinite values: `(groups,)` bool.

    Args:
        samples: Samples, with those of a group adjacent. The engine's log-probabilities are checked.
        group: Number of samples of a group.
        on_non_finite: Whether to raise an error, or to leave such groups out.
        values: Further values to check by name, `(samples,)` each.
        rows: Row of each sample, for the error message.

    Raises:
        NonFiniteError: If some groups have such values, and `on_non_finite` is not `skip`.
    """
    wrong: dict[int, str] = {}
    for name, tensor in values.items():
        for index in (~tensor.isfinite()).nonzero()[:, 0].tolist():
            wrong.setdefault(index, f"the {name} of completion {index % group} is {tensor[index].item()}")
    for index, sample in enumerate(samples):
        if not math.isfinite(sum(sample.logprobs)):
            number, value = next(pair for pair in enumerate(sample.logprobs) if not math.isfinite(pair[1]))
            problem = f"the engine's log-probability of token {number} of completion {index % group} is {value}"
            wrong.setdefault(index, problem)
    if wrong and on_non_finite is NonFinite.RAISE:
        index, problem = next(iter(wrong.items()))
        row = f" ({shown(rows[index])})" if rows else ""
        raise NonFiniteError(
            f"{problem}, to question {index // group}{row}; {len(wrong)} completions have such values: expected finite "
            "numbers. Correct the reward function or the engine, or drop such groups with on_non_finite='skip'."
        )
    usable = torch.ones(len(samples) // group, dtype=torch.bool)
    usable[[index // group for index in wrong]] = False
    return usable
