"""Losses on pairs of answers, one preferred to the other: DPO, and the ranking loss of a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def sequence_logprobs(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of whole answers, `(sequences,)`: sums of `(sequences, length)` where `mask` is True."""
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
    """Direct preference optimisation (https://arxiv.org/abs/2305.18290, equation 7).

    `mean -log sigmoid(beta ((chosen - reference_chosen) - (rejected - reference_rejected)))`

    Args:
        chosen, rejected: `(pairs,)`, fp32: log-probabilities of the answers under the policy, with a graph.
        reference_chosen, reference_rejected: `(pairs,)`: the same under the policy it started from.
        beta: how much leaving the reference costs.

    Returns:
        A scalar, fp32.
    """
    margin = (chosen - rejected) - (reference_chosen - reference_rejected).detach()
    return -F.logsigmoid(beta * margin).mean()


def ranking_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, margin: float = 0.0) -> torch.Tensor:
    """The Bradley-Terry loss of a reward model (https://arxiv.org/abs/2203.02155, equation 1).

    `mean -log sigmoid(chosen - rejected - margin)`

    Args:
        chosen, rejected: `(pairs,)`, fp32: the scores of the answers, with a graph.
        margin: by how much the chosen answer is to be better (https://arxiv.org/abs/2307.09288, equation 2).

    Returns:
        A scalar, fp32.
    """
    return -F.logsigmoid(chosen.float() - rejected.float() - margin).mean()


def misordered(chosen: Sequence[float] | torch.Tensor, rejected: Sequence[float] | torch.Tensor) -> list[int]:
    """The pairs that a reward model orders wrongly: indices where the chosen answer does not score above the rejected.

    Equal scores are wrong, and so is NaN: a model whose head was never loaded orders nothing. Scores themselves move
    with versions and kernels by more than their order does, so that the order is what to check.

    Raises:
        ValueError: lists of different lengths, or empty ones.
    """
    first, second = torch.as_tensor(chosen).detach().double(), torch.as_tensor(rejected).detach().double()
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(f"expected two lists of one length, got {tuple(first.shape)} and {tuple(second.shape)}")
    return (~(first > second)).nonzero()[:, 0].tolist()
