"""Scores of sequences as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from nrl_models.engines.base import Engine
from nrl_models.logprobs.sampling import Sampling


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Convert lists of different lengths to one fp64 tensor padded with NaN, `(batch, max_length)`."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=math.nan)


def final_scores(engine: Engine, tokens: torch.Tensor, count: int, sampling: Sampling, **options: Any) -> torch.Tensor:
    """Score the last `count` tokens of `tokens` `(batch, seq_len)`. Returns fp64 `(batch, count)`."""
    scores = engine.score(tokens.tolist(), sampling, last=count, **options)
    return torch.tensor([row[len(row) - count :] for row in scores], dtype=torch.float64)
