"""Find values of a configuration, and weights, that load without an error and are probably a mistake."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from nrl_models.diagnostics.rope_values import contradicting_rope, impossible_rope
from nrl_models.engines.digests import tensor_digest
from nrl_models.errors import listed

LARGEST_EPSILON = 1e-2
"""Largest epsilon of a norm that is plausible. Published models have at most 1e-3."""

LARGEST_DROPOUT = 0.2
"""Largest dropout that is plausible."""

LARGEST_RATIO = 100
"""Largest plausible ratio of the root mean squares of a weight in two layers."""

SPLITS = ("pretraining_tp", "tp_size", "ep_size")
"""Keys that state how a training job was split. They change no result, except for rounding in old versions."""

_NUMBER = re.compile(r"(?<=[.\[])\d+(?=[.\]])")

STORED_METHODS = frozenset({"fp8", "mxfp8", "mxfp4", "gptq", "awq"})
"""Quantization methods whose checkpoints have quantized tensors. Others may quantize while loading."""


def impossible_values(config: PreTrainedConfig, generation: GenerationConfig | None, rows: int) -> list[str]:
    """Return values that no engine can use, or that contradict another value.

    Args:
        config: The text configuration.
        generation: The generation configuration, if the checkpoint has one.
        rows: Number of embedding rows.
    """
    longest = getattr(config, "max_position_embeddings", None)
    wrong = [f"config.json max_position_embeddings is {longest}"] if isinstance(longest, int) and longest < 1 else []
    wrong += [f"config.json {key} is {value}" for key, value in _numbers(config, "eps", "epsilon") if value < 0]
    wrong += [f"config.json {key} is {value}" for key, value in _numbers(config, "experts_per_tok") if value < 1]
    wrong += impossible_rope(config)
    wrong += contradicting_rope(config)
    if generation is not None:
        ranges: Mapping[str, tuple[float, float]] = {
            "temperature": (0.0, float("inf")),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "top_k": (-1, float("inf")),
            "repetition_penalty": (1e-6, float("inf")),
            "pad_token_id": (-1, rows - 1),
        }
        for key, (least, most) in ranges.items():
            value = getattr(generation, key, None)
            if isinstance(value, int | float) and not least <= value <= most:
                wrong.append(f"generation_config.json {key} is {value}, expected {least:g} to {most:g}")
    return wrong


def doubtful_values(config: PreTrainedConfig, dtypes: Mapping[str, int]) -> list[str]:
    """Return values that are possible, but that hardly any model has.

    Args:
        config: The text configuration.
        dtypes: Number of stored tensors by dtype.
    """
    doubtful = [
        f"config.json {key} is {value:g}, larger than {LARGEST_EPSILON:g}"
        for key, value in _numbers(config, "eps", "epsilon")
        if value > LARGEST_EPSILON
    ]
    doubtful += [
        f"config.json {key} is {value:g}: log-probabilities of a model in train() are random"
        for key, value in _numbers(config, "dropout", "pdrop")
        if value > LARGEST_DROPOUT
    ]
    pad = getattr(config, "pad_token_id", None)
    if isinstance(pad, int) and pad < 0:
        doubtful.append(f"config.json pad_token_id is {pad}: the last row counts as padding, without gradient")
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, Mapping) else getattr(settings, "quant_method", None)
    stored = {name for name in dtypes if name not in ("float32", "float16", "bfloat16", "float64")}
    if settings is not None and str(getattr(method, "value", method)) in STORED_METHODS and not stored:
        doubtful.append(f"config.json has a quantization_config of {method}, but no tensor is quantized")
    return doubtful


def unused_values(config: PreTrainedConfig) -> list[str]:
    """Return values that request a split, which neither transformers nor engines apply. The check passes with them.

    Args:
        config: The text configuration.
    """
    values = {key: getattr(config, key, None) for key in SPLITS}
    return [
        f"config.json {key} is {value} and has no effect: --tp and --ep of a trainer or an engine split the model"
        for key, value in values.items()
        if isinstance(value, int) and value > 1
    ]


def unlisted_tensors(folder: Path) -> list[str]:
    """Return a problem if the index of a sharded checkpoint does not list the tensors of its files."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    listed_files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    if absent := sorted({file for file in listed_files.values() if not (folder / file).is_file()}):
        return [f"{index.name} names files that do not exist: {listed(absent)}"]
    stored: dict[str, str] = {}
    for file in sorted({*listed_files.values()}):
        with safe_open(folder / file, framework="pt") as tensors:
            stored |= dict.fromkeys(tensors.keys(), file)
    wrong = sorted(name for name in {*stored, *listed_files} if stored.get(name) != listed_files.get(name))
    return [f"{index.name} does not list these tensors under their files: {listed(wrong)}"] if wrong else []


def doubtful_weights(model: nn.Module) -> list[str]:
    """Return matrices that are zero, equal another one, or are far larger than those of the same name in other layers.

    A part may not have been saved, or may have been copied or scaled. Of a stack of experts, each expert counts as a
    matrix. Embeddings do not count. Norms count if they are zero in some layers only.
    """
    zero: list[str] = []
    equal: list[str] = []
    norms: set[str] = set()  # their scale differs between layers of healthy models
    first: dict[tuple[object, ...], str] = {}
    scales: dict[str, dict[str, float]] = defaultdict(dict)
    for name, tensor in _matrices(model):
        scales[_NUMBER.sub("*", name)][name] = scale = tensor.float().square().mean().sqrt().item()
        if tensor.ndim == 1:
            norms.add(name)
        elif scale == 0:
            zero.append(name)
        else:
            key = (tensor.shape, tensor.dtype, tensor_digest(tensor))
            if (other := first.setdefault(key, name)) != name:
                equal.append(f"{name} = {other}")
    large: list[str] = []
    for group in scales.values():
        if any(group.values()):
            zero += [name for name, scale in group.items() if scale == 0 and name not in zero]
        matrices = {name: scale for name, scale in group.items() if scale and name not in norms}
        least = min(matrices.values(), default=0.0)
        large += [name for name, scale in matrices.items() if scale > LARGEST_RATIO * least]
    problems = {
        "zero weights": zero,
        "equal weights": equal,
        f"weights {LARGEST_RATIO} times as large as in another layer": large,
    }
    return [f"{problem}: {listed(names, limit=4)}" for problem, names in problems.items() if names]


def _matrices(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights of linears, routers, experts and norms."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            last = path.rpartition(".")[2]
            if parameter.ndim == 3 and "expert" in name:
                yield from ((f"{name}[{number}]", expert) for number, expert in enumerate(parameter.detach()))
            elif (parameter.ndim == 2 and (isinstance(module, nn.Linear) or last in ("gate", "router"))) or (
                parameter.ndim == 1 and "norm" in last and name.endswith(".weight")
            ):
                yield name, parameter.detach()


def _numbers(config: PreTrainedConfig, *endings: str) -> Iterator[tuple[str, float]]:
    """Yield numbers of a configuration whose keys have an ending."""
    for key, value in config.to_dict().items():
        if key.endswith(endings) and isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value
