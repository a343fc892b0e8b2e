"""Section `projections`: fused against separate projections."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.models import (
    AGAIN,
    COMBINED,
    SEPARATE,
    UPSTREAM,
    alternate,
    config_of,
    contenders,
    labeled,
    random_tokens,
    ratio,
)
from benchmarks.reporting import Row

WORKLOADS = {
    "forward, 1 token": (1, 1, False),
    "forward, 2048 tokens": (1, 2048, False),
    "train, 4096": (1, 4096, True),
}
"""Batch size, sequence length, and whether to run a backward."""

TINY_WORKLOADS = {"forward, 1 token": (1, 1, False), "train, 32": (1, 32, True)}

NAMES = (UPSTREAM, AGAIN, COMBINED, SEPARATE)
BYTES_PER_PARAMETER = len(NAMES) * 2 + 2  # gradients of one model at a time


def cases(context: Context) -> dict[str, Case]:
    """Return a case per shape."""
    return {shape: partial(_compare, shape, context) for shape in ("Llama 1B", "Llama 8B")}


def _compare(shape: str, context: Context) -> list[Row]:
    config = config_of(shape, context, bytes_per_parameter=BYTES_PER_PARAMETER)
    models = contenders(NAMES, config, context)
    rows: list[Row] = []
    for workload, (batch, length, train) in (TINY_WORKLOADS if context.tiny else WORKLOADS).items():
        tokens = random_tokens(config, context, batch, length)
        ways = {name: partial(step, model, tokens, train) for name, model in models.items()}
        seconds = alternate(ways, context.device, runs=3 if context.tiny else 15, warm_up=1 if context.tiny else 3)
        rows.append(
            {
                "shape": labeled(shape, config),
                "workload": workload,
                "transformers, ms": 1e3 * median(seconds[UPSTREAM]),
                "combined / separate": ratio(seconds, COMBINED, SEPARATE),
                "combined / transformers": ratio(seconds, COMBINED, UPSTREAM),
                "separate / transformers": ratio(seconds, SEPARATE, UPSTREAM),
                "null ratio": ratio(seconds, AGAIN, UPSTREAM),
            }
        )
    return rows


def step(model: Any, tokens: torch.Tensor, train: bool) -> None:
    """Run a forward, or a forward and backward."""
    if train:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad()
    else:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
