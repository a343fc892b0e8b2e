"""What becomes of rewards before they reach a loss: advantages, dropped groups, a penalty on length."""

from __future__ import annotations

import torch

from nrl_models.errors import NonFiniteError, UnknownArgumentError

SMALLEST_SPREAD = 1e-4
"""Added to a group's standard deviation, as TRL does: groups whose rewards hardly differ stay finite."""


def group_advantages(rewards: torch.Tensor, *, scale: bool) -> torch.Tensor:
    """How much better each reply is than its group's mean.

    Args:
        rewards: `(groups, group)`.
        scale: whether to divide by the group's standard deviation (unbiased), as GRPO and DAPO do. Dr. GRPO
            (https://arxiv.org/abs/2503.20783) does not: it makes questions count more whose rewards hardly differ.

    Returns:
        `(groups, group)`, fp32; zero for a group of equal rewards.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
        UnknownArgumentError: `scale` is not a bool.
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
    """Which groups `(groups, group)` have rewards that differ: `(groups,)` bool.

    The others have no advantage and no gradient. DAPO's dynamic sampling drops them and samples more
    (https://arxiv.org/abs/2503.14476, equation 11). It compares raw rewards, without penalties: replies that are all
    wrong differ in length alone, which teaches no answer.
    """
    return rewards.amax(1) > rewards.amin(1)


def overlong_penalty(lengths: torch.Tensor, longest: int, buffer: int, penalty: float = 1.0) -> torch.Tensor:
    """DAPO's soft punishment of replies that come close to the limit (https://arxiv.org/abs/2503.14476, equation 13).

    Zero up to `longest - buffer` tokens, falling from there to `-penalty` at `longest`.

    Args:
        lengths: `(replies,)`: tokens of each.
        longest: tokens a reply can have.
        buffer: how many tokens before that the penalty begins.
        penalty: the largest, above 0.

    Returns:
        `(replies,)`, fp32: what is added to the reward.

    Raises:
        ValueError: a buffer that is not between 1 and `longest`.
    """
    if not 1 <= buffer <= longest:
        raise ValueError(f"overlong buffer of {buffer} tokens: expected 1 to {longest}, what a reply can have")
    return penalty * ((longest - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)
