"""Losses on pairs of a chosen and a rejected answer: DPO, and the ranking loss of a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def sequence_logprobs(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum `(batch, seq_len)` log-probabilities where `mask` is True. Returns `(batch,)`."""
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
    """Direct preference optimization (https://arxiv.org/abs/2305.18290, equation 7).

    `mean -log sigmoid(beta ((chosen - reference_chosen) - (rejected - reference_rejected)))`

    Args:
        chosen, rejected: Log-probabilities of the answers under the policy, `(pairs,)`, fp32 with a graph.
        reference_chosen, reference_rejected: Log-probabilities under the initial policy, `(pairs,)`.
        beta: Strength of the penalty for leaving the reference.

    Returns:
        A scalar in fp32.
    """
    margin = (chosen - rejected) - (reference_chosen - reference_rejected).detach()
    return -F.logsigmoid(beta * margin).mean()


def ranking_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, margin: float = 0.0) -> torch.Tensor:
    """The Bradley-Terry loss of a reward model (https://arxiv.org/abs/2203.02155, equation 1).

    `mean -log sigmoid(chosen - rejected - margin)`

    Args:
        chosen, rejected: Scores of the answers, `(pairs,)`, fp32 with a graph.
        margin: Required difference of the scores (https://arxiv.org/abs/2307.09288, equation 2).

    Returns:
        A scalar in fp32.
    """
    return -F.logsigmoid(chosen.float() - rejected.float() - margin).mean()


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
