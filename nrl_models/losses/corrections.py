"""Corrections for tokens that an engine sampled from a distribution which is not quite the trainer's.

With the ratio `w = exp(trainer - engine)` of a token, or of a whole sequence (the product of its tokens'):

| type | weight | source |
|---|---|---|
| `tis`, truncated importance sampling | `min(w, cap)` | https://fengyao.notion.site/off-policy-rl |
| `mis`, masked importance sampling | `w` where `floor <= w <= cap`, else 0 | IcePop, https://arxiv.org/abs/2510.18855 |

Neither hides an engine that computes another model: look at `token_mult_prob_error` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

import torch

from nrl_models.errors import NonFiniteError, UnknownArgumentError


class CorrectionType(StrEnum):
    """What happens to a ratio out of bounds."""

    TIS = "tis"
    MIS = "mis"


class Level(StrEnum):
    """What a ratio is of."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Correction:
    """How importance weights are made.

    Args:
        type: `tis` or `mis`. There is no default: a bound without a type says nothing.
        cap: the largest weight (`tis`), or the largest that is kept (`mis`).
        floor: the smallest weight that is kept, for `mis` alone.
        level: of each token, or of each sequence.

    Raises:
        UnknownArgumentError: the type is missing or unknown, or a bound makes no sense; all of them.
    """

    type: CorrectionType | str | None = None
    cap: float = 2.0
    floor: float = 0.0
    level: Level | str = Level.TOKEN

    def __post_init__(self) -> None:
        """Check everything, and make enums of names."""
        wrong = []
        if self.type not in list(CorrectionType):
            missing = "; the correction is on, but nothing says what it does" if self.type is None else ""
            wrong.append(
                f"Invalid truncated importance sampling type: {self.type}{missing}: expected "
                f"{' or '.join(CorrectionType)}"
            )
        if self.level not in list(Level):
            wrong.append(f"level={self.level!r}: expected {' or '.join(Level)}")
        if not (isinstance(self.cap, Real) and 0.0 < self.cap < float("inf")):
            wrong.append(f"cap={self.cap!r}: expected a number above 0")
        elif not isinstance(self.floor, Real):
            wrong.append(f"floor={self.floor!r}: expected a number")
        elif self.floor and self.type != CorrectionType.MIS:
            wrong.append(f"floor={self.floor}: only mis has one")
        elif not 0.0 <= self.floor < self.cap:
            wrong.append(f"floor={self.floor}: expected a number of at least 0, below the cap of {self.cap}")
        if wrong:
            raise UnknownArgumentError("; ".join(wrong))
        object.__setattr__(self, "type", CorrectionType(str(self.type)))
        object.__setattr__(self, "level", Level(self.level))


def importance_weights(
    trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> torch.Tensor:
    """What each token's loss is multiplied by, see the module.

    Args:
        trainer: `(sequences, length)`: log-probabilities under the policy that the step began with.
        engine: `(sequences, length)`: what the engine sampled the same tokens with.
        mask: `(sequences, length)`, True for sampled tokens.
        correction: which.

    Returns:
        `(sequences, length)`, fp32 without a graph; 0 where `mask` is False. Of `Level.SEQUENCE` all tokens of a
        sequence have the same.

    Raises:
        NonFiniteError: the engine's log-probability of a sampled token is NaN or infinite.
        UnknownArgumentError: `correction` is not a `Correction`.
    """
    if not isinstance(correction, Correction):
        raise UnknownArgumentError(f"correction={correction!r}: expected a Correction, e.g. Correction('tis')")
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
    if correction.level is Level.SEQUENCE:
        difference = difference.sum(1, keepdim=True).expand_as(difference)
    ratio = difference.exp()
    if correction.type is CorrectionType.TIS:
        ratio = ratio.clamp(max=correction.cap)
    else:
        ratio = torch.where((ratio >= correction.floor) & (ratio <= correction.cap), ratio, 0.0)
    return torch.where(mask, ratio, 0.0).float()
