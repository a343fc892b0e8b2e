"""Processing of rewards before a loss: advantages, dropped groups, a penalty on length."""

from __future__ import annotations

import torch

from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.errors import NonFiniteError, UnknownArgumentError, shown
from nrl_models.losses.loss_checks import require_one_shape, require_tensors

SMALLEST_SPREAD = 1e-4
"""Added to a group's standard deviation, as in TRL, so that advantages are finite if rewards hardly differ."""


def group_advantages(rewards: torch.Tensor, *, scale: bool) -> torch.Tensor:
    """Compute the advantage of each completion over the mean of its group.

    Args:
        rewards: `(groups, group_size)`.
        scale: Whether to divide by the group's standard deviation (unbiased), as GRPO and DAPO do. Dr. GRPO
            (https://arxiv.org/abs/2503.20783) does not, because it increases the weight of groups with similar rewards.

    Returns:
        Advantages `(groups, group_size)` in fp32; exactly zero for a group of equal rewards.

    Raises:
        NonFiniteError: If a reward is NaN or infinite, or an advantage exceeds the range of fp32.
        UnknownArgumentError: If `scale` is not a bool, or `rewards` is not a tensor.
        ValueError: If `rewards` has another number of dimensions.
    """
    if not isinstance(scale, bool):
        raise UnknownArgumentError(f"scale={scale!r}: expected True or False")
    _require_finite(rewards)
    advantages = unchecked_advantages(rewards, scale=scale)
    if bool((~advantages.isfinite()).any()):
        group = int((~advantages.isfinite()).nonzero()[0, 0])
        raise NonFiniteError(
            f"the rewards of question {group} are from {rewards[group].min().item():g} to "
            f"{rewards[group].max().item():g}: their differences exceed the range of fp32"
        )
    return advantages


def unchecked_advantages(rewards: torch.Tensor, *, scale: bool) -> torch.Tensor:
    """Compute `group_advantages`, without its checks: a group that exceeds the range of fp32 has infinite values."""
    # The mean of equal rewards may be rounded, so subtract one of the rewards first.
    behind = rewards.double() - rewards[:, :1].double()
    advantages = behind - behind.mean(1, keepdim=True)
    if scale:
        spread = behind.std(1, keepdim=True) if behind.shape[1] > 1 else torch.zeros_like(behind)
        advantages = advantages / (spread + SMALLEST_SPREAD)
    return advantages.float()


def _require_finite(rewards: torch.Tensor) -> None:
    require_one_shape("groups, group_size", rewards=rewards)
    if not bool(rewards.isfinite().all()):
        group, completion = (~rewards.isfinite()).nonzero()[0].tolist()
        reward = rewards[group, completion].item()
        raise NonFiniteError(
            f"the reward of completion {completion} to question {group} is {reward}: expected finite numbers"
        )


def teaching_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Return a bool per group, `(groups,)`: whether its `(groups, group_size)` rewards differ.

    Other groups have zero advantage and no gradient. DAPO's dynamic sampling drops them and samples more
    (https://arxiv.org/abs/2503.14476, equation 11). It compares rewards without penalties, because completions that are
    all wrong may differ only in length.

    Raises:
        NonFiniteError: If a reward is NaN or infinite.
        UnknownArgumentError: If `rewards` is not a tensor.
        ValueError: If `rewards` has another number of dimensions.
    """
    _require_finite(rewards)
    if not rewards.shape[1]:
        return torch.zeros(len(rewards), dtype=torch.bool, device=rewards.device)
    return rewards.amax(1) > rewards.amin(1)


def overlong_penalty(lengths: torch.Tensor, longest: int, buffer: int, penalty: float = 1.0) -> torch.Tensor:
    """Compute DAPO's soft penalty for completions close to the length limit.

    Zero up to `longest - buffer` tokens, then falling linearly to `-penalty` at `longest`. From
    https://arxiv.org/abs/2503.14476, equation 13.

    Args:
        lengths: Number of tokens of each completion, `(batch,)`.
        longest: Maximum number of tokens of a completion.
        buffer: Number of tokens before the maximum at which the penalty begins.
        penalty: Maximum penalty, at least 0.

    Returns:
        Values to add to the rewards, `(batch,)`, fp32.

    Raises:
        UnknownArgumentError: If `lengths` is not a tensor, `longest` or `buffer` is not a whole number, or `penalty` is
            not a number of at least 0.
        ValueError: If `buffer` is not between 1 and `longest`.
    """
    require_tensors(lengths=lengths)
    for name, value in (("longest", longest), ("buffer", buffer)):
        if not is_integer(value):
            raise UnknownArgumentError(f"{name}={shown(value)}: expected a number of tokens")
    if not is_number(penalty, 0.0):
        raise UnknownArgumentError(f"penalty={shown(penalty)}: expected a finite number of at least 0")
    if not 1 <= buffer <= longest:
        raise ValueError(f"overlong buffer of {buffer} tokens: expected 1 to {longest}, the length of a completion")
    return penalty * ((longest - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)
