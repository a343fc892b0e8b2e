"""Losses by their names in recipes, with their settings."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.deprecation import with_new_keywords
from nrl_models.errors import UnknownArgumentError, did_you_mean, parse_option
from nrl_models.losses.corrections import Correction
from nrl_models.losses.policy import Normalize


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """Cross-entropy on the tokens of answers. It has no settings."""


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Settings of `dpo_loss`.

    Args:
        beta: See `dpo_loss`.

    Raises:
        UnknownArgumentError: If `beta` is not a number above 0.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        """Check the value."""
        if not (is_number(self.beta, 0.0) and self.beta):
            raise UnknownArgumentError(f"beta={self.beta!r}: expected a number above 0")


@dataclass(frozen=True, slots=True)
class RankingLoss:
    """Settings of `ranking_loss`.

    Args:
        margin: See `ranking_loss`.

    Raises:
        UnknownArgumentError: If `margin` is not a number.
    """

    margin: float = 0.0

    def __post_init__(self) -> None:
        """Check the value."""
        if not is_number(self.margin):
            raise UnknownArgumentError(f"margin={self.margin!r}: expected a number")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Settings of `policy_loss`, and of the processing of rewards.

    Args:
        normalize: Weighting of tokens, see `token_weights`.
        scale_rewards: See `scale` of `group_advantages`.
        eps_low, eps_high, kl: See `policy_loss`.
        dynamic_sampling: Maximum number of question batches to sample in order to fill one with groups whose rewards
            differ. 0 keeps all groups of the first batch.
        overlong_buffer, overlong_penalty: See `overlong_penalty`. A buffer of 0 disables the penalty.
        correction: See `importance_weights`; None disables them.

    Raises:
        UnknownArgumentError: If values are out of range. Lists all of them.
        UnknownOptionError: If `normalize` is not a `Normalize`.
    """

    normalize: Normalize
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
        object.__setattr__(self, "normalize", parse_option(Normalize, self.normalize, "normalize"))
        largest = {"eps_high": math.inf, "kl": sys.float_info.max, "overlong_penalty": sys.float_info.max}
        wrong = [
            f"{name}={getattr(self, name)!r}: expected a number of at least 0"
            for name, most in largest.items()
            if not is_number(getattr(self, name), 0.0, most)
        ]
        wrong += [
            f"{name}={getattr(self, name)!r}: expected a whole number of at least 0"
            for name in ("dynamic_sampling", "overlong_buffer")
            if not is_integer(getattr(self, name))
        ]
        if not is_number(self.eps_low, 0.0, 1.0):
            wrong.append(f"eps_low={self.eps_low!r}: expected a number from 0 to 1, since ratios are positive")
        if not isinstance(self.scale_rewards, bool):
            wrong.append(f"scale_rewards={self.scale_rewards!r}: expected True or False")
        if not isinstance(self.correction, Correction | None):
            wrong.append(f"correction={self.correction!r}: expected a Correction, e.g. Correction('tis'), or None")
        if wrong:
            raise UnknownArgumentError("; ".join(wrong))


NamedLoss = SupervisedLoss | PreferenceLoss | RankingLoss | PolicyLoss

LOSSES: Mapping[str, NamedLoss] = {
    "sft": SupervisedLoss(),
    "dpo": PreferenceLoss(),
    "reward": RankingLoss(),
    "grpo": PolicyLoss(Normalize.SEQUENCE, scale_rewards=True),
    "dr_grpo": PolicyLoss(Normalize.LONGEST, scale_rewards=False),
    "dapo": PolicyLoss(Normalize.TOKEN, scale_rewards=True, eps_high=0.28, dynamic_sampling=10),
}
"""Losses by name, with the settings of their papers."""


def loss_named(name: str, **settings: Any) -> NamedLoss:
    """Return a loss by its name, optionally with changed settings.

    Raises:
        UnknownArgumentError: If the name or a setting is unknown. The message lists the valid ones.
    """
    if not isinstance(name, str) or name not in LOSSES:
        raise UnknownArgumentError(
            f"unknown loss {name!r}{did_you_mean(name, LOSSES)}: expected one of {', '.join(LOSSES)}"
        )
    settings = with_new_keywords(settings, {"normalise": "normalize"})  # codespell:ignore
    known = [field.name for field in fields(LOSSES[name])]
    if unknown := [key for key in settings if key not in known]:
        raise UnknownArgumentError(
            f"the loss {name} has no setting {', '.join(unknown)}: expected some of {', '.join(known) or 'none'}"
        )
    return replace(LOSSES[name], **settings)
