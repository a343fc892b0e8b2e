"""Section `logprobs`: memory and time of log-probabilities at a vocabulary of 128,256."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.context import Case, Context
from benchmarks.logprobs import compare
from benchmarks.reporting import Row


def cases(context: Context) -> dict[str, Case]:
    """Return a case per dtype."""
    if context.tiny:
        return {"float32": partial(_compare, context, torch.float32)}
    return {
        "bfloat16": partial(_compare, context, torch.bfloat16),
        "float32": partial(_compare, context, torch.float32),
    }


def _compare(context: Context, dtype: torch.dtype) -> list[Row]:
    sizes = {"tokens": 256, "vocabulary": 8192, "hidden_size": 64} if context.tiny else {"hidden_size": 2048}
    name = str(dtype).removeprefix("torch.")
    rows = compare(context.device, dtype, runs=2 if context.tiny else 5, warm_up=1, **sizes)
    return [{"dtype": name} | row for row in rows]
