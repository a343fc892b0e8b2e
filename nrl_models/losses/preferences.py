"""Losses on pairs of a chosen and a rejected answer: DPO, and the ranking loss of a reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from nrl_models.common.value_checks import is_number
from nrl_models.errors import NonFiniteError, UnknownArgumentError, shown
from nrl_models.losses.loss_checks import require_mask, require_one_shape


def sequence_logprobs(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum `(batch, seq_len)` log-probabilities where `mask` is True. Returns `(batch,)`.

    Raises:
        UnknownArgumentError: If an argument is not a tensor.
        ValueError: If shapes differ, or `mask` has values other than 0 and 1.
    """
    require_one_shape("sequences, length", logprobs=logprobs, mask=mask)
    require_mask(mask)
    wide = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    return torch.where(mask.bool(), wide, 0.0).sum(1)


def dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
) -> torch.Tensor:
    """Compute the loss of direct preference optimization (https://arxiv.org/abs/2305.18290, equation 7).

    `mean -log sigmoid(beta ((chosen - reference_chosen) - (rejected - reference_rejected)))`

    Args:
        chosen, rejected: Log-probabilities of the answers under the policy, `(pairs,)`, fp32 with a graph.
        reference_chosen, reference_rejected: Log-probabilities under the initial policy, `(pairs,)`.
        beta: Strength of the penalty for leaving the reference.

    Returns:
        A scalar, at least in fp32.

    Raises:
        NonFiniteError: If a log-probability under the initial policy is NaN or infinite.
        UnknownArgumentError: If `beta` is not a number above 0, or another argument is not a tensor.
        ValueError: If shapes differ, or there are no pairs.
    """
    _require_pairs(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    if not (is_number(beta, 0.0) and beta):
        raise UnknownArgumentError(f"beta={shown(beta)}: expected a number above 0")
    _require_finite(reference_chosen=reference_chosen, reference_rejected=reference_rejected)
    margin = _margin(chosen, rejected) - _margin(reference_chosen, reference_rejected).detach()
    return -F.logsigmoid(beta * margin).mean()


def _require_finite(**values: torch.Tensor) -> None:
    """Check that `(pairs,)` numbers without a graph are finite. A NaN would make the loss of all pairs NaN."""
    if torch.compiler.is_compiling():  # values of tensors are not available
        return
    if bool(torch.stack([numbers.isfinite().all() for numbers in values.values()]).all()):  # synchronizes a GPU once
        return
    for name, numbers in values.items():
        for pair, number in enumerate(numbers.tolist()):
            if not math.isfinite(number):
                raise NonFiniteError(f"{name} of pair {pair} is {number}: expected finite numbers")


def ranking_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, margin: float = 0.0) -> torch.Tensor:
    """Compute the Bradley-Terry loss of a reward model (https://arxiv.org/abs/2203.02155, equation 1).

    `mean -log sigmoid(chosen - rejected - margin)`

    Args:
        chosen, rejected: Scores of the answers, `(pairs,)`, fp32 with a graph.
        margin: Required difference of the scores (https://arxiv.org/abs/2307.09288, equation 2).

    Returns:
        A scalar, at least in fp32.

    Raises:
        UnknownArgumentError: If `margin` is not a finite number, or another argument is not a tensor.
        ValueError: If shapes differ, or there are no pairs.
    """
    _require_pairs(chosen=chosen, rejected=rejected)
    if not is_number(margin):
        raise UnknownArgumentError(f"margin={shown(margin)}: expected a finite number")
    return -F.logsigmoid(_margin(chosen, rejected) - margin).mean()


def _require_pairs(**values: torch.Tensor) -> None:
    require_one_shape("pairs", **values)
    if not values["chosen"].numel():
        raise ValueError("there are no pairs: the mean over them is not defined")


def _margin(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(torch.promote_types(chosen.dtype, rejected.dtype), torch.float32)
    return chosen.to(wide) - rejected.to(wide)


def misordered(chosen: Sequence[float] | torch.Tensor, rejected: Sequence[float] | torch.Tensor) -> list[int]:
    """Return the indices of pairs whose chosen answer does not have a higher score than the rejected one.

    Equal scores and NaN count as wrong, because a head that was not loaded gives no order. Check the order rather than
    the scores, because versions and kernels change scores more often than their order.

    Raises:
        ValueError: If the lists are empty or have different lengths.
    """
    first, second = torch.as_tensor(chosen).detach().double(), torch.as_tensor(rejected).detach().double()
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(f"expected two lists of one length, got {tuple(first.shape)} and {tuple(second.shape)}")
    return (~(first > second)).nonzero()[:, 0].tolist()
