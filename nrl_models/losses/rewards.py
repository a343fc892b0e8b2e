"""Processing of rewards before a loss: advantages, dropped groups, a penalty on length."""

from __future__ import annotations

import torch

from nrl_models.errors import NonFiniteError, UnknownArgumentError

SMALLEST_SPREAD = 1e-4
"""Added to a group's standard deviation, as in TRL, so that advantages are finite if rewards hardly differ."""


def group_advantages(rewards: torch.Tensor, *, scale: bool) -> torch.Tensor:
    """Compute the advantage of each completion over the mean of its group.

    Args:
        rewards: `(groups, group_size)`.
        scale: Whether to divide by the group's standard deviation (unbiased), as GRPO and DAPO do. Dr. GRPO
            (https://arxiv.org/abs/2503.20783) does not, because it increases the weight of groups with similar rewards.

    Returns:
        Advantages `(groups, group_size)` in fp32; zero for a group of equal rewards.

    Raises:
        NonFiniteError: If a reward is NaN or infinite.
        UnknownArgumentError: If `scale` is not a bool.
    """
    if not isinstance(scale, bool):
        raise UnknownArgumentError(f"scale={scale!r}: expected True or False")
    rewards = rewards.float()
    if not bool(rewards.isfinite().all()):
        group, reply = (~rewards.isfinite()).nonzero()[0].tolist()
        found = rewards[group, reply].item()
        raise NonFiniteError(f"the reward of reply {reply} to question {group} is {found}: expected finite numbers")
    advantages = rewards - rewards.mean(1, keepdim=True)
    if not scale:
        return advantages
    spread = rewards.std(1, keepdim=True) if rewards.shape[1] > 1 else torch.zeros_like(rewards)
    return advantages / (spread + SMALLEST_SPREAD)


def teaching_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Return a bool per group, `(groups,)`: whether its `(groups, group_size)` rewards differ.

    Other groups have zero advantage and no gradient. DAPO's dynamic sampling drops them and samples more
    (https://arxiv.org/abs/2503.14476, equation 11). It compares rewards without penalties, because completions that are
    all wrong may differ only in length.
    """
    return rewards.amax(1) > rewards.amin(1)


def overlong_penalty(lengths: torch.Tensor, longest: int, buffer: int, penalty: float = 1.0) -> torch.Tensor:
    """DAPO's soft penalty for completions close to the length limit (https://arxiv.org/abs/2503.14476, equation 13).

    Zero up to `longest - buffer` tokens, then falling linearly to `-penalty` at `longest`.

    Args:
        lengths: Number of tokens of each completion, `(batch,)`.
        longest: Maximum number of tokens of a completion.
        buffer: Number of tokens before the maximum at which the penalty begins.
        penalty: Maximum penalty, above 0.

    Returns:
        Values to add to the rewards, `(batch,)`, fp32.

    Raises:
        ValueError: If `buffer` is not between 1 and `longest`.
    """
    if not 1 <= buffer <= longest:
        raise ValueError(f"overlong buffer of {buffer} tokens: expected 1 to {longest}, the length of a completion")
    return penalty * ((longest - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)
