"""Section `training`: speed and MFU of a training step."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.models import (
    AGAIN,
    COMBINED,
    SEPARATE,
    UPSTREAM,
    config_of,
    contenders,
    labeled,
    random_tokens,
)
from benchmarks.reporting import Row
from benchmarks.train_step import active_parameters, measure

NAMES = (UPSTREAM, AGAIN, COMBINED, SEPARATE)
BYTES_PER_PARAMETER = len(NAMES) * (2 + 4) + 2  # weights and AdamW's states; gradients of one model at a time


def cases(context: Context) -> dict[str, Case]:
    """Return a case per shape."""
    shapes = ("Llama 1B", "Qwen3-MoE 30B-A3B") if context.tiny else ("Llama 1B", "Llama 8B", "Qwen3-MoE 30B-A3B")
    return {shape: partial(_steps, shape, context) for shape in shapes}


def _steps(shape: str, context: Context) -> list[Row]:
    config = config_of(shape, context, bytes_per_parameter=BYTES_PER_PARAMETER)
    models = contenders(NAMES, config, context)
    length = 64 if context.tiny else 4096
    tokens = random_tokens(config, context, 1, length)
    operations = operations_per_token(models[UPSTREAM], length)
    found = measure(models, 2 if context.tiny else 6, tokens, UPSTREAM)
    return [
        {
            "shape": labeled(shape, config),
            "model": name,
            "tokens/s": values["tokens"],
            "MFU": operations * values["tokens"] / context.peak if context.peak else "",
            "share of matmul speed": operations * values["tokens"] / values["matmul"],
            "step memory, GB": values["memory"] / 1e9,
            "time / transformers": values["ratio"],
        }
        for name, values in found.items()
    ]


def operations_per_token(model: Any, length: int) -> int:
    """Return the floating-point operations of a forward and backward per token, with causal attention."""
    config = model.config
    attention = 6 * length * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 6 * active_parameters(model) + attention
