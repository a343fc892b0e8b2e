"""Shapes, contenders with equal weights, and timing of alternating runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from benchmarks.gpu.context import Context
from nrl_models import AutoModelForCausalLM

SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Llama 1B": (
        LlamaConfig,
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
    ),
    "Llama 8B": (
        LlamaConfig,
        {
            "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 4, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000, "max_position_embeddings": 8192,
        },
    ),
    "Qwen3-MoE 30B-A3B": (
        Qwen3MoeConfig,
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
            "num_experts_per_tok": 8, "vocab_size": 32_000, "max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip
"""Widths of published models. `Llama 8B` has 4 layers, and `Qwen3-MoE 30B-A3B` 4 layers with 64 experts."""

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 512,
}  # fmt: skip

MEMORY_SHARE = 0.6
"""Share of the free memory for weights, gradients and optimizer states. Activations need the rest."""


def config_of(shape: str, context: Context, *, bytes_per_parameter: float = 0.0) -> Any:
    """Return the configuration of a shape, with fewer layers if the device's memory is too small.

    Args:
        shape: Key of `SHAPES`.
        context: Device, and whether to shrink the shape.
        bytes_per_parameter: Memory per parameter, over all contenders, optimizer states included.
    """
    config_class, values = SHAPES[shape]
    if context.tiny:
        values = values | {key: value for key, value in TINY.items() if key in values}
    config = config_class(**values, architectures=[f"{config_class.__name__.removesuffix('Config')}ForCausalLM"])
    if context.device.type == "cuda" and bytes_per_parameter:
        free = torch.cuda.mem_get_info()[0] * MEMORY_SHARE
        while config.num_hidden_layers > 1 and parameters_of(config) * bytes_per_parameter > free:
            config.num_hidden_layers //= 2
    return config


def parameters_of(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a model."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def labeled(shape: str, config: Any) -> str:
    """Return the name of a shape with its number of layers."""
    return f"{shape}, {config.num_hidden_layers} layers"


COMBINED, SEPARATE = "combined", "separate"
UPSTREAM, AGAIN = "transformers", "transformers, again"


def contender(name: str, config: PreTrainedConfig, context: Context) -> Any:
    """Build a model on the device: `combined` or `separate` by nrl_models, any other name by transformers."""
    torch.manual_seed(0)
    if name in (COMBINED, SEPARATE):
        return AutoModelForCausalLM.from_config(
            config, dtype=context.dtype, device=context.device, combine=name == COMBINED
        )
    with context.device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=context.dtype)


def contenders(names: Sequence[str], config: PreTrainedConfig, context: Context) -> dict[str, Any]:
    """Build several models with the weights of the first."""
    models: dict[str, Any] = {}
    for name in names:
        models[name] = contender(name, config, context).train()
        if len(models) > 1:
            models[name].load_state_dict(next(iter(models.values())).state_dict())
    return models


def random_tokens(config: PreTrainedConfig, context: Context, batch: int, length: int) -> torch.Tensor:
    """Return random token IDs, `(batch, length)`, equal on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (batch, length), generator=generator).to(context.device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alternate(
    ways: Mapping[str, Callable[[], object]],
    device: torch.device,
    runs: int,
    warm_up: int = 2,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of each run of each way. The ways take turns, in reversed order every other turn.

    Args:
        ways: Functions to time, by name.
        device: Device to wait for before and after each run.
        runs: Number of runs of each way.
        warm_up: Number of earlier runs that do not count.
        between: Called before each run. Its time does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(warm_up + runs):
        for name, way in list(ways.items())[:: -1 if run % 2 else 1]:
            between()
            synchronize(device)
            started = time.perf_counter()
            way()
            synchronize(device)
            if run >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """Return the median over the turns of the time of `name` relative to `base`."""
    return median(ours / theirs for ours, theirs in zip(seconds[name], seconds[base], strict=True))
