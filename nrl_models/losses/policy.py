"""Losses of policy gradients on the log-probabilities of sampled tokens: GRPO, Dr. GRPO and DAPO.

With the ratio `r = exp(logprobs - old)` and the advantage `A` of a token's sequence, the loss of a token is

    -w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) + kl k3(reference, policy)

where `w` corrects for an engine that is not quite the trainer (`nrl_models.losses.corrections`). The methods differ in
the bounds of the clip, in how advantages are scaled (`nrl_models.losses.rewards`), and in how much a token counts:

| method | clip | counts | paper |
|---|---|---|---|
| GRPO | symmetric | each sequence the same | https://arxiv.org/abs/2402.03300 |
| Dr. GRPO | symmetric | each token the same, over the tokens there could have been | https://arxiv.org/abs/2503.20783 |
| DAPO | wider above than below | each token the same, over the tokens there are | https://arxiv.org/abs/2503.14476 |
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from nrl_models.errors import parse_option

ROOM = 4.0
"""How far below the logarithm of a dtype's largest number an exponential times its factor stays: room for corrections
and sums of up to e^4."""

LARGEST_LOG_RATIO = 1e6
"""Larger log-ratios, infinity among them, have no gradient."""


class Normalise(StrEnum):
    """How much the loss of a token counts."""

    SEQUENCE = "sequence"
    """The mean over sequences of the mean over each one's tokens: GRPO."""
    TOKEN = "token"
    """The mean over all tokens: DAPO."""
    LONGEST = "longest"
    """The sum over all tokens, by how many there would be if all sequences were as long as they can be: Dr. GRPO."""


def token_weights(
    mask: torch.Tensor, normalise: Normalise | str, longest: int | None = None, *, group: Any = None
) -> torch.Tensor:
    """How much each token counts in the loss of a step.

    They are those of a whole step: the losses of its micro-batches, each with its rows of them, add up to the step's.
    Over several ranks, each with its own sequences, the mean of the ranks' losses is the step's, as FSDP and DDP take
    the mean of their gradients. Ranks that share their sequences, as tensor parallelism has them, change nothing.

    Args:
        mask: `(sequences, length)`, True for the tokens that were sampled. Sequences without any count as sequences.
        normalise: a `Normalise`, or its value.
        longest: tokens that a sequence could have had, for `Normalise.LONGEST`.
        group: the process group whose ranks' sequences make the step, and which all call this; all ranks by default
            where torch.distributed is initialised.

    Returns:
        `(sequences, length)`, fp32; zero where `mask` is False.

    Raises:
        ValueError: `Normalise.LONGEST` without `longest`, or `longest` where it is not used.
        UnknownOptionError: `normalise` is not one of `Normalise`.
    """
    normalise = parse_option(Normalise, normalise, "normalise")
    if (longest is None) == (normalise is Normalise.LONGEST):
        raise ValueError(f"longest={longest}: expected with normalise='longest', and only there")
    counted = mask.bool().float()
    total, ranks = torch.stack([mask.bool().sum(), torch.tensor(len(mask), device=mask.device)]), 1
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, group=group)
        ranks = dist.get_world_size(group)
    tokens, sequences = (count / ranks for count in total.tolist())
    if normalise is Normalise.TOKEN:
        return counted / tokens if tokens else counted
    if longest is not None:
        return counted / (sequences * longest)
    return counted / counted.sum(1, keepdim=True).clamp(min=1.0) / sequences


def policy_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    correction: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    kl: float = 0.0,
) -> torch.Tensor:
    """The loss of some sequences; see the module for the formula.

    Loss and gradient are finite for any log-ratio: where `r A` approaches the largest number of the dtype (`e^88` in
    fp32), both stay what they are a little below it.

    Args:
        logprobs: `(sequences, length)`, fp32: those of the policy, with a graph.
        old: `(sequences, length)`: of the policy that the step began with; `logprobs.detach()` in its first update.
        advantages: `(sequences,)`.
        weights: `(sequences, length)`: `token_weights`; where they are zero, nothing else is read: multiply them by
            the mask of each of the other arguments.
        eps_low, eps_high: how far the ratio may fall below 1, and rise above it, before its gradient ends.
        correction: `(sequences, length)`: `importance_weights`; 1 by default.
        reference: `(sequences, length)`: of the policy that `kl` holds to.
        kl: how much the divergence from the reference costs, by the estimator k3 of each token.

    Returns:
        A scalar, fp32.

    Raises:
        ValueError: shapes that differ, or only one of `reference` and `kl`.
    """
    _require_shapes(logprobs, old=old, weights=weights, correction=correction, reference=reference)
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"expected advantages of {tuple(logprobs.shape[:1])}, got {tuple(advantages.shape)}")
    if (reference is None) == bool(kl):
        raise ValueError(f"kl={kl}: expected with the reference's log-probabilities, and only with them")
    difference = _difference(logprobs, old.detach(), weights)
    counted = weights > 0
    gain = torch.where(counted, advantages.to(difference)[:, None], 0.0)
    ratio = _bounded(difference, gain).exp()
    terms = -torch.minimum(ratio * gain, ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * gain)
    if correction is not None:
        terms = terms * torch.where(counted, correction.detach().to(terms), 0.0)
    if reference is not None:
        behind = _difference(reference.detach(), logprobs, weights)
        terms = terms + kl * (_bounded(behind, behind.new_tensor(kl)).expm1() - behind)
    return (terms * weights).sum()


def clipped_share(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> float:
    """The share of tokens whose gradient the clip ended; arguments as for `policy_loss`."""
    with torch.no_grad():
        ratio = torch.exp(_difference(logprobs, old, weights))
        gain = advantages.to(ratio)[:, None]
        ended = ((ratio > 1.0 + eps_high) & (gain > 0)) | ((ratio < 1.0 - eps_low) & (gain < 0))
        counted = weights > 0
        return (ended & counted).sum().item() / max(1, int(counted.sum()))


def _difference(first: torch.Tensor, second: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`first - second` in fp32 or wider, zero where a token does not count: what stands there may be NaN."""
    wide = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return torch.where(weights > 0, first.to(wide) - second.to(first.device, wide), 0.0)


def _bounded(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Bound the values, but not their gradient, so that `exp(values) * factor` is finite."""
    bound = math.log(torch.finfo(values.dtype).max) - ROOM - factor.abs().clamp(min=1.0).log()
    values = values.clamp(max=LARGEST_LOG_RATIO)
    return torch.where(values > bound, bound + (values - values.detach()), values)


def _require_shapes(logprobs: torch.Tensor, **others: torch.Tensor | None) -> None:
    wrong = [f"{name} {tuple(value.shape)}" for name, value in others.items() if value is not None]
    if logprobs.ndim != 2 or any(value is not None and value.shape != logprobs.shape for value in others.values()):
        raise ValueError(
            f"expected (sequences, length) of all; got logprobs {tuple(logprobs.shape)}, {', '.join(wrong)}"
        )
