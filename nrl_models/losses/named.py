"""The losses by the names that recipes give them, with their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

from nrl_models.errors import UnknownArgumentError, did_you_mean, parse_option
from nrl_models.losses.corrections import Correction
from nrl_models.losses.policy import Normalise


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """Cross-entropy on the tokens of answers; it has no settings."""


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """`dpo_loss`.

    Args:
        beta: see there.

    Raises:
        UnknownArgumentError: `beta` is not a number above 0.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        """Check the value."""
        if not (_is_finite(self.beta) and self.beta > 0):
            raise UnknownArgumentError(f"beta={self.beta!r}: expected a number above 0")


@dataclass(frozen=True, slots=True)
class RankingLoss:
    """`ranking_loss`.

    Args:
        margin: see there.

    Raises:
        UnknownArgumentError: `margin` is not a number.
    """

    margin: float = 0.0

    def __post_init__(self) -> None:
        """Check the value."""
        if not _is_finite(self.margin):
            raise UnknownArgumentError(f"margin={self.margin!r}: expected a number")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`policy_loss`, and what becomes of rewards before it.

    Args:
        normalise: how much a token counts, see `token_weights`.
        scale_rewards: see `group_advantages`.
        eps_low, eps_high, kl: see `policy_loss`.
        dynamic_sampling: how many batches of questions may be sampled to fill one with groups that teach something;
            0 keeps all groups of the first.
        overlong_buffer, overlong_penalty: see `overlong_penalty`; a buffer of 0 leaves rewards as they are.
        correction: see `importance_weights`; None leaves them out.

    Raises:
        UnknownArgumentError: a value out of range; all of them.
        UnknownOptionError: `normalise` is not one of `Normalise`.
    """

    normalise: Normalise
    scale_rewards: bool
    eps_low: float = 0.2
    eps_high: float = 0.2
    kl: float = 0.0
    dynamic_sampling: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    correction: Correction | None = None

    def __post_init__(self) -> None:
        """Check the values, and make enums of names."""
        object.__setattr__(self, "normalise", parse_option(Normalise, self.normalise, "normalise"))
        wrong = [
            f"{name}={getattr(self, name)!r}: expected a number of at least 0"
            for name in ("eps_high", "kl", "dynamic_sampling", "overlong_buffer", "overlong_penalty")
            if not (isinstance(getattr(self, name), Real) and getattr(self, name) >= 0)
        ]
        if not (isinstance(self.eps_low, Real) and 0.0 <= self.eps_low <= 1.0):
            wrong.append(f"eps_low={self.eps_low!r}: expected a number from 0 to 1, since ratios are positive")
        if not isinstance(self.scale_rewards, bool):
            wrong.append(f"scale_rewards={self.scale_rewards!r}: expected True or False")
        if not isinstance(self.correction, Correction | None):
            wrong.append(f"correction={self.correction!r}: expected a Correction, e.g. Correction('tis'), or None")
        if wrong:
            raise UnknownArgumentError("; ".join(wrong))


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


Loss = SupervisedLoss | PreferenceLoss | RankingLoss | PolicyLoss

LOSSES: Mapping[str, Loss] = {
    "sft": SupervisedLoss(),
    "dpo": PreferenceLoss(),
    "reward": RankingLoss(),
    "grpo": PolicyLoss(Normalise.SEQUENCE, scale_rewards=True),
    "dr_grpo": PolicyLoss(Normalise.LONGEST, scale_rewards=False),
    "dapo": PolicyLoss(Normalise.TOKEN, scale_rewards=True, eps_high=0.28, dynamic_sampling=10),
}
"""The losses by name, with the settings that their papers give them."""


def loss_named(name: str, **settings: Any) -> Loss:
    """A loss by its name, with other settings where they are given.

    Raises:
        UnknownArgumentError: an unknown name, or settings that this loss does not have; it lists those there are.
    """
    if name not in LOSSES:
        raise UnknownArgumentError(
            f"unknown loss {name!r}{did_you_mean(name, LOSSES)}: expected one of {', '.join(LOSSES)}"
        )
    known = [field.name for field in fields(LOSSES[name])]
    if unknown := [key for key in settings if key not in known]:
        raise UnknownArgumentError(
            f"the loss {name} has no setting {', '.join(unknown)}: expected some of {', '.join(known) or 'none'}"
        )
    return replace(LOSSES[name], **settings)
