"""Metrics of one step from log-probabilities that exist anyway: how far trainer and engine differ, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nrl_models.logprobs.metrics import kl_k3, shown_error, token_mult_prob_error

GROWTH = 3.0
"""An error grows with the position if the last quarter of positions has this many times that of the first."""

QUARTER_TOKENS = 8
"""Tokens that a quarter of positions needs to be compared."""

PADDED_FACTOR = 10.0
"""Rows with padding differ if their error is this many times that of rows without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Published bounds on a healthy difference.

    Args:
        token_mult_prob_error: NeMo RL's guide for new models.
        kl: mean of `exp(r) - 1 - r`, `r` = trainer - engine; prime-rl masks rollouts above it.
        mean_difference: mean of `abs(r)` in nats; SkyRL's tests.
    """

    token_mult_prob_error: float = 1.05
    kl: float = 0.015
    mean_difference: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """How far trainer and engine differ in one step.

    Args:
        tokens: number of compared tokens: sampled, with finite log-probabilities on both sides.
        token_mult_prob_error, kl, mean_difference: see `Bars`; NaN without tokens.
        max_difference: largest `abs(r)` in nats.
        not_finite: number of sampled tokens with a NaN or infinite log-probability on either side.
        growth: mean error of the last quarter of positions over that of the first; NaN if there are too few tokens.
        padded_ratio: mean error of rows with padding over that of rows without; NaN if there is only one kind.
    """

    tokens: int
    token_mult_prob_error: float
    kl: float
    mean_difference: float
    max_difference: float
    not_finite: int
    growth: float = math.nan
    padded_ratio: float = math.nan

    @property
    def excess(self) -> float:
        """`token_mult_prob_error - 1`: 0 if both sides agree."""
        return self.token_mult_prob_error - 1.0

    @property
    def grows(self) -> bool:
        """Whether the error grows with the position."""
        return self.growth > GROWTH

    @property
    def only_padded(self) -> bool:
        """Whether only rows with padding differ."""
        return self.padded_ratio > PADDED_FACTOR

    def above(self, bars: Bars) -> list[str]:
        """Name the bars that are exceeded."""
        error = self.token_mult_prob_error
        pairs = {
            f"token_mult_prob_error {shown_error(error)} > {shown_error(bars.token_mult_prob_error)}": (
                error > bars.token_mult_prob_error
            ),
            f"KL {self.kl:.3g} > {bars.kl:g}": self.kl > bars.kl,
            f"mean difference {self.mean_difference:.3g} > {bars.mean_difference:g}": (
                self.mean_difference > bars.mean_difference
            ),
        }
        return [text for text, is_above in pairs.items() if is_above]

    def values(self) -> dict[str, float]:
        """Return numbers for a logger."""
        return {
            "token_mult_prob_error": self.token_mult_prob_error,
            "kl": self.kl,
            "mean_difference": self.mean_difference,
            "max_difference": self.max_difference,
            "tokens": float(self.tokens),
            "not_finite": float(self.not_finite),
        }


def step_metrics(
    trainer: torch.Tensor,
    engine: torch.Tensor,
    mask: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> StepMetrics:
    """Compare log-probabilities of the same sampled tokens.

    Args:
        trainer, engine: log-probabilities `(rows, length)`.
        mask: True for sampled tokens, `(rows, length)`.
        attention_mask: True for tokens that are not padding, `(rows, any length)`. Default: no row has padding.

    Raises:
        ValueError: the shapes differ.
    """
    shapes = {name: tuple(value.shape) for name, value in {"trainer": trainer, "engine": engine, "mask": mask}.items()}
    if trainer.ndim != 2 or len(set(shapes.values())) != 1:
        raise ValueError(f"expected three tensors of shape (rows, length), got {shapes}")
    if attention_mask is not None and len(attention_mask) != len(mask):
        raise ValueError(f"attention_mask has {len(attention_mask)} rows, trainer has {len(mask)}")
    trainer, engine = trainer.detach().double().cpu(), engine.detach().double().cpu()
    mask = mask.detach().bool().cpu()
    is_finite = trainer.isfinite() & engine.isfinite()
    compared = mask & is_finite
    difference = torch.where(compared, trainer - engine, 0.0).abs()
    chosen = difference[compared]
    return StepMetrics(
        tokens=chosen.numel(),
        token_mult_prob_error=token_mult_prob_error(trainer, engine, compared),
        kl=kl_k3(trainer, engine, compared),
        mean_difference=chosen.mean().item() if chosen.numel() else math.nan,
        max_difference=chosen.max().item() if chosen.numel() else math.nan,
        not_finite=int((mask & ~is_finite).sum()),
        growth=_growth(difference, compared),
        padded_ratio=_padded_ratio(difference, compared, attention_mask),
    )


def _growth(difference: torch.Tensor, compared: torch.Tensor) -> float:
    """Mean error of the last quarter of positions in the completions over that of the first."""
    position = compared.long().cumsum(1)
    longest = int(position.max()) if position.numel() else 0
    first = compared & (position <= longest / 4)
    last = compared & (position > longest * 3 / 4)
    if min(int(first.sum()), int(last.sum())) < QUARTER_TOKENS:
        return math.nan
    return (difference[last].mean() / difference[first].mean().clamp(min=1e-12)).item()


def _padded_ratio(difference: torch.Tensor, compared: torch.Tensor, attention_mask: torch.Tensor | None) -> float:
    if attention_mask is None:
        return math.nan
    padded = ~attention_mask.detach().bool().cpu().all(1)
    counts = compared.sum(1)
    means = difference.sum(1) / counts.clamp(min=1)
    with_padding, without = means[padded & (counts > 0)], means[~padded & (counts > 0)]
    if not len(with_padding) or not len(without):
        return math.nan
    return (with_padding.mean() / without.mean().clamp(min=1e-12)).item()
