"""Importance weights for tokens that an engine sampled from a slightly different distribution than the trainer's.

`w = exp(trainer - engine)` is the ratio of a token, or the product of the ratios of a sequence:

| type | weight | source |
|---|---|---|
| `tis`, truncated importance sampling | `min(w, cap)` | https://fengyao.notion.site/off-policy-rl |
| `mis`, masked importance sampling | `w` where `floor <= w <= cap`, else 0 | IcePop, https://arxiv.org/abs/2510.18855 |

Corrections do not fix an engine that computes a different model: check `token_mult_prob_error` first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from nrl_models.common.value_checks import is_number
from nrl_models.errors import NonFiniteError, UnknownArgumentError
from nrl_models.losses.loss_checks import require_mask, require_one_shape


class CorrectionType(StrEnum):
    """Treatment of a ratio out of bounds."""

    TIS = "tis"
    MIS = "mis"


class RatioLevel(StrEnum):
    """Unit that has one ratio: a token, or a sequence."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Correction:
    """Settings of importance weights.

    Args:
        type: `tis` or `mis`. Required, because the bounds mean different things in the two.
        cap: Upper bound: the largest weight (`tis`), or the largest ratio that is kept (`mis`).
        floor: Smallest ratio that is kept; only for `mis`.
        level: Whether ratios are per token or per sequence.

    Raises:
        UnknownArgumentError: If the type is missing or unknown, or a bound is invalid. The message lists all problems.
    """

    type: CorrectionType | str | None = None
    cap: float = 2.0
    floor: float = 0.0
    level: RatioLevel | str = RatioLevel.TOKEN

    def __post_init__(self) -> None:
        """Validate all fields, and convert names to enums."""
        wrong = []
        if self.type not in list(CorrectionType):
            missing = "; the correction is on, but has no type" if self.type is None else ""
            wrong.append(
                f"Invalid truncated importance sampling type: {self.type}{missing}: expected "
                f"{' or '.join(CorrectionType)}"
            )
        if self.level not in list(RatioLevel):
            wrong.append(f"level={self.level!r}: expected {' or '.join(RatioLevel)}")
        if not (is_number(self.cap, 0.0) and self.cap):
            wrong.append(f"cap={self.cap!r}: expected a number above 0")
        elif not is_number(self.floor, -math.inf, math.inf):
            wrong.append(f"floor={self.floor!r}: expected a number")
        elif self.floor and self.type != CorrectionType.MIS:
            wrong.append(f"floor={self.floor}: only mis has one")
        elif not 0.0 <= self.floor < self.cap:
            wrong.append(f"floor={self.floor}: expected a number of at least 0, below the cap of {self.cap}")
        if wrong:
            raise UnknownArgumentError("; ".join(wrong))
        object.__setattr__(self, "type", CorrectionType(str(self.type)))
        object.__setattr__(self, "level", RatioLevel(self.level))


def importance_weights(
    trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> torch.Tensor:
    """Compute the factor of each token's loss, see the module docstring.

    Args:
        trainer: Log-probabilities under the policy at the start of the step, `(batch, seq_len)`.
        engine: Log-probabilities of the same tokens in the engine's sampling, `(batch, seq_len)`.
        mask: `(batch, seq_len)`, True for sampled tokens.
        correction: The correction.

    Returns:
        Weights `(batch, seq_len)` in fp32 without a graph; 0 where `mask` is False. With `RatioLevel.SEQUENCE`, all
        tokens of a sequence have the same weight. NaN where the trainer's log-probability is NaN.

    Raises:
        NonFiniteError: If the engine's log-probability of a sampled token is NaN or infinite.
        UnknownArgumentError: If `correction` is not a `Correction`, or another argument is not a tensor.
        ValueError: If shapes differ, or `mask` has values other than 0 and 1.
    """
    if not isinstance(correction, Correction):
        raise UnknownArgumentError(f"correction={correction!r}: expected a Correction, e.g. Correction('tis')")
    require_one_shape("sequences, length", trainer=trainer, engine=engine, mask=mask)
    require_mask(mask)
    mask = mask.bool()
    engine = engine.detach().to(trainer.device)
    wrong = mask & ~engine.isfinite()
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise NonFiniteError(
            f"the engine's log-probability of token {column} of sequence {row} is {engine[row, column].item()}: "
            "expected finite numbers where the mask is True"
        )
    difference = torch.where(mask, trainer.detach().double() - engine.double(), 0.0)
    if correction.level is RatioLevel.SEQUENCE:
        difference = difference.sum(1, keepdim=True).expand_as(difference)
    ratio = difference.exp()
    if correction.type is CorrectionType.TIS:
        ratio = ratio.clamp(max=correction.cap)
    else:
        ratio = ratio.masked_fill((ratio < correction.floor) | (ratio > correction.cap), 0.0)
    return torch.where(mask, ratio, 0.0).float()
