"""Policy-gradient losses on log-probabilities of sampled tokens: GRPO, Dr. GRPO and DAPO.

With the ratio `r = exp(logprobs - old)` and the advantage `A` of the token's sequence, the loss of a token is

    -w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) + kl k3(reference, policy)

where `w` corrects for differences between engine and trainer (`nrl_models.losses.corrections`). The methods differ in
the clip bounds, the scaling of advantages (`nrl_models.losses.rewards`), and the weighting of tokens:

| method | clip | weights | paper |
|---|---|---|---|
| GRPO | symmetric | equal per sequence | https://arxiv.org/abs/2402.03300 |
| Dr. GRPO | symmetric | equal per token, divided by the maximum number of tokens | https://arxiv.org/abs/2503.20783 |
| DAPO | higher upper bound | equal per token, divided by the number of tokens | https://arxiv.org/abs/2503.14476 |
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.errors import UnknownArgumentError, parse_option, shown
from nrl_models.losses.loss_checks import require_mask, require_one_shape, require_tensors, require_values

ROOM = 4.0
"""Margin between the logarithm of a dtype's largest number and an exponential times its factor. Leaves room for
corrections and sums of up to e^4."""

LARGEST_LOG_RATIO = 1e6
"""Largest log-ratio with a gradient. Log-ratios above it, or below its negative, have none, including infinity."""


class Normalize(StrEnum):
    """Normalization of the loss: how much the loss of each token counts."""

    SEQUENCE = "sequence"
    """Mean over sequences of the mean over their tokens (GRPO)."""
    TOKEN = "token"
    """Mean over all tokens (DAPO)."""
    LONGEST = "longest"
    """Sum over all tokens, divided by the token count if all sequences had maximum length (Dr. GRPO)."""


def token_weights(
    mask: torch.Tensor, normalize: Normalize | str, longest: int | None = None, *, group: Any = None
) -> torch.Tensor:
    """Compute the weight of each token in the loss of a step.

    The weights are those of a complete step: the losses of its microbatches, each with its rows of the weights, add up
    to the step's loss. With several ranks that have different sequences, the mean over the ranks' losses is the step's
    loss, because FSDP and DDP average gradients. Ranks with the same sequences (tensor parallelism) have no effect.

    Args:
        mask: `(batch, seq_len)`, True for sampled tokens. Sequences without any still count as sequences.
        normalize: A `Normalize` or its value.
        longest: Maximum number of tokens of a sequence, for `Normalize.LONGEST`.
        group: Process group whose ranks' sequences form the step. All its ranks have to call this. Default: all ranks,
            if torch.distributed is initialized.

    Returns:
        Weights `(batch, seq_len)` in fp32; zero where `mask` is False.

    Raises:
        ValueError: If `Normalize.LONGEST` has no `longest`, or another value has one. Also if `mask` has another shape,
            or values other than 0 and 1.
        UnknownArgumentError: If `longest` is not a whole number above 0, or `mask` is not a tensor.
        UnknownOptionError: If `normalize` is not a `Normalize`.
    """
    normalize = parse_option(Normalize, normalize, "normalize")
    if (longest is None) == (normalize is Normalize.LONGEST):
        raise ValueError(f"longest={longest}: expected with normalize='longest', and only there")
    if longest is not None and not is_integer(longest, 1):
        raise UnknownArgumentError(f"longest={shown(longest)}: expected a whole number of at least 1")
    require_one_shape("sequences, length", mask=mask)
    require_mask(mask)
    counted = mask.bool().float()
    total, ranks = torch.stack([mask.bool().sum(), torch.tensor(len(mask), device=mask.device)]), 1
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, group=group)
        ranks = dist.get_world_size(group)
    tokens, sequences = (count / ranks for count in total.tolist())
    if normalize is Normalize.TOKEN:
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
    """Compute the loss of some sequences; see the module docstring for the formula.

    Loss and gradient are finite for any log-ratio. If `r A` approaches the maximum of the dtype (`e^88` in fp32), both
    are clamped to their values slightly below.

    Args:
        logprobs: Log-probabilities of the policy, `(batch, seq_len)`, fp32 with a graph.
        old: Log-probabilities of the policy at the start of the step, `(batch, seq_len)`. Use `logprobs.detach()` in
            its first update.
        advantages: Advantage of each sequence, `(batch,)`.
        weights: `token_weights`, `(batch, seq_len)`. Tokens with weight zero are ignored in all arguments, so multiply
            the weights by the masks of the other arguments.
        eps_low, eps_high: Distances of the clip bounds of the ratio below and above 1.
        correction: `importance_weights`, `(batch, seq_len)`; default: 1.
        reference: Log-probabilities of the reference policy for `kl`, `(batch, seq_len)`.
        kl: Coefficient of the divergence from the reference, estimated per token by k3.

    Returns:
        A scalar in fp32.

    Raises:
        NonFiniteError: If an advantage, a correction or a weight is NaN or infinite, a weight is negative, or a
            log-ratio is NaN although `logprobs` is not.
        UnknownArgumentError: If `eps_low`, `eps_high` or `kl` is out of range, an argument is not a tensor, or
            `logprobs` are integers.
        ValueError: If shapes differ, or only one of `reference` and `kl` is passed.
    """
    _require_arguments(logprobs, old, advantages, weights, eps_low, eps_high, kl, correction, reference)
    if (reference is None) == bool(kl):
        raise ValueError(f"kl={kl}: expected with the reference's log-probabilities, and only with them")
    difference = _difference(logprobs, old.detach(), weights)
    wrong = {"old": (old, difference.isnan())}
    wrong["advantages"] = (advantages[:, None].expand_as(logprobs), ~advantages.isfinite()[:, None])
    if correction is not None:
        wrong["correction"] = (correction, ~correction.isfinite())
    if reference is not None:
        behind = _difference(reference.detach(), logprobs, weights)
        wrong["reference"] = (reference, behind.isnan())
    require_values(logprobs.detach(), weights, **wrong)
    counted = weights > 0
    gain = torch.where(counted, advantages.to(difference)[:, None], 0.0)
    factor = 1.0 if correction is None else torch.where(counted, correction.detach().to(gain), 0.0)
    ratio = _bounded(difference, gain * factor, logprobs.dtype).exp()
    # As torch.minimum(ratio * gain, ratio.clamp(...) * gain). In torch 2.15, clamp has no gradient at its bounds.
    above, below = _clipped(ratio, gain, eps_low, eps_high)
    clipped = torch.where(above, 1.0 + eps_high, torch.where(below, 1.0 - eps_low, ratio))
    terms = -clipped * gain * factor
    if reference is not None:
        behind = _limited(behind)
        terms = terms + kl * (_bounded(behind, behind.new_tensor(kl), logprobs.dtype).expm1() - behind)
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
    """Return the fraction of tokens whose gradient is zero due to the clip. For arguments, see `policy_loss`."""
    _require_arguments(logprobs, old, advantages, weights, eps_low, eps_high)
    with torch.no_grad():
        ratio = torch.exp(_difference(logprobs, old, weights))
        gain = advantages.to(ratio)[:, None]
        above, below = _clipped(ratio, gain, eps_low, eps_high)
        ended = above | below
        counted = weights > 0
        return (ended & counted).sum().item() / max(1, int(counted.sum()))


def _clipped(
    ratio: torch.Tensor, gain: torch.Tensor, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the ratio is clipped to its upper bound, and where to its lower bound."""
    return (ratio > 1.0 + eps_high) & (gain > 0), (ratio < 1.0 - eps_low) & (gain < 0)


def _difference(first: torch.Tensor, second: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `first - second` in at least fp32, zero for tokens with weight zero, whose values may be NaN."""
    wide = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return torch.where(weights > 0, first.to(wide) - second.to(first.device, wide), 0.0)


def _bounded(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Limit the values so that `exp(values) * factor` is finite, also in `dtype`. Their gradient is not limited."""
    room = ROOM + factor.abs().clamp(min=1.0).log()
    bound = math.log(torch.finfo(values.dtype).max) - room
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:  # fp16. A factor alone may exceed it
        bound = torch.minimum(bound, (math.log(torch.finfo(dtype).max) - room).clamp(min=0.0))
    values = _limited(values)
    return torch.where(values > bound, bound + (values - values.detach()), values)


def _limited(values: torch.Tensor) -> torch.Tensor:
    """Limit log-ratios to `LARGEST_LOG_RATIO`. At the limit itself, they keep their gradient, unlike with `clamp`."""
    return torch.where(values.abs() <= LARGEST_LOG_RATIO, values, values.detach().sign() * LARGEST_LOG_RATIO)


def _require_arguments(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    eps_low: float,
    eps_high: float,
    kl: float = 0.0,
    correction: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> None:
    """Check shapes and settings, see `policy_loss`."""
    grids = {"logprobs": logprobs, "old": old, "weights": weights, "correction": correction, "reference": reference}
    require_one_shape("sequences, length", **grids)
    require_tensors(advantages=advantages)
    if not logprobs.is_floating_point():
        raise UnknownArgumentError(f"logprobs is of {logprobs.dtype}: expected floating-point log-probabilities")
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"expected advantages of {tuple(logprobs.shape[:1])}, got {tuple(advantages.shape)}")
    if not is_number(eps_low, 0.0, 1.0):
        raise UnknownArgumentError(f"eps_low={shown(eps_low)}: expected a number from 0 to 1")
    if not is_number(eps_high, 0.0, math.inf):
        raise UnknownArgumentError(f"eps_high={shown(eps_high)}: expected a number of at least 0")
    if not is_number(kl, 0.0):
        raise UnknownArgumentError(f"kl={shown(kl)}: expected a finite number of at least 0")
