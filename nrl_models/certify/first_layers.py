"""Checkpoints of the first layers of a model, for machines without the memory for all of them."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedConfig

from nrl_models.auto import auto_class_for
from nrl_models.certify.certified import read_files
from nrl_models.common.checkpoint.dequantized import quantized_part
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, INDEX_NAME, is_gguf
from nrl_models.common.gguf.gguf_files import open_files
from nrl_models.common.state_dict.adapter import adapter_of
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.errors import CheckpointError, ConfigurationError, NRLModelsError, Problem, ProblemKind, one_line
from nrl_models.loading.read_config import read_config

COUNTED_FROM_LAST = ("num_kv_shared_layers",)
"""Keys that count layers from the last one: the first layers have fewer of these, or none."""


def write_first_layers(folder: Path, layers: int, target: Path) -> Path:
    """Write a checkpoint of a model's first decoder layers, with its embeddings, head and towers.

    Draft layers are left out. One file is read at a time.

    Args:
        folder: The checkpoint.
        layers: Number of layers to keep.
        target: Directory to write to. An existing one is replaced.

    Returns:
        `target`.

    Raises:
        CheckpointError: If the checkpoint is a GGUF file, or has tensors that span all layers.
        ConfigurationError: If the model has no more than `layers` layers, or no model has that few.
    """
    if is_gguf(folder):
        problem = Problem(ProblemKind.FORMAT, folder.name, "is a GGUF file, expected safetensors files")
        raise CheckpointError(f"cannot select layers of {folder}", [problem])
    config = _config_of_first(folder, layers)
    auto_class = auto_class_for(folder)
    full_model = auto_class.from_config(read_config(folder), device="meta")
    try:
        cut = auto_class.from_config(config, device="meta")
    except (NRLModelsError, ValueError, KeyError, IndexError) as error:
        detail = f"no model has only {layers} layers: {one_line(error)}"
        raise ConfigurationError(
            f"cannot select layers of {folder}", [Problem(ProblemKind.CONFIG, "num_hidden_layers", detail)]
        ) from error
    files = open_files(folder)
    retained_specs, names = adapter_of(cut).hub, adapter_of(full_model).hub
    dropped = {name for name in names if name not in retained_specs} | set(MTPNames(full_model).among(files.tensors))
    parts = {_module(name) for name in dropped} - {_module(name) for name in retained_specs}
    by_file: dict[str, list[str]] = defaultdict(list)
    is_quantized = quantized_part(config) is not None
    problems = []
    for key, stored in files.tensors.items():
        spellings = {key, f"model.{key}", key.removeprefix("model.")}
        if spellings & dropped or {_module(spelling) for spelling in spellings} & parts:
            continue
        by_file[stored.file].append(key)
        spec = next((retained_specs[spelling] for spelling in sorted(spellings) if spelling in retained_specs), None)
        if spec is not None and tuple(spec.shape) != tuple(stored.shape) and not is_quantized:
            problems.append(stored.problem(ProblemKind.SHAPE, f"{stored.shape} spans all layers"))
    if problems:
        raise CheckpointError(f"cannot select layers of {folder}", problems)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    _copy_others(folder, target)
    config.save_pretrained(target)
    _write(files, by_file, target)
    return target


def _config_of_first(folder: Path, layers: int) -> PreTrainedConfig:
    """Return the configuration with fewer layers, and lists of values per layer cut to as many."""
    config = read_config(folder)
    text: Any = config.get_text_config(decoder=True)
    count = text.num_hidden_layers
    if not 0 < layers < count:
        detail = f"the model has {count} layers, expected fewer to select, and at least one: omit --layers to check all"
        raise ConfigurationError(
            f"cannot select {layers} layers of {folder}", [Problem(ProblemKind.CONFIG, "num_hidden_layers", detail)]
        )
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, key, value[:layers])
        elif key in COUNTED_FROM_LAST and isinstance(value, int):
            setattr(text, key, max(0, value - (count - layers)))
    text.num_hidden_layers = layers
    return config


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _copy_others(folder: Path, target: Path) -> None:
    """Copy tokenizer, templates and other files that are read, without weights, index and configuration."""
    for path in read_files(folder):
        relative = path.relative_to(folder)
        is_weights = path.suffix == ".safetensors" or path.name.endswith(INDEX_NAME.removeprefix("model"))
        if not is_weights and path.name != CONFIG_NAME:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)


def _write(files: CheckpointFiles, by_file: dict[str, list[str]], target: Path) -> None:
    """Write the tensors of each file to one file, and an index."""
    places: dict[str, str] = {}
    for number, keys in enumerate(by_file.values()):
        name = f"model-{number + 1:05d}-of-{len(by_file):05d}.safetensors"
        save_file({key: files.read(files.tensors[key]) for key in keys}, target / name, metadata={"format": "pt"})
        places |= dict.fromkeys(keys, name)
    size = sum(files.tensors[key].nbytes for key in places)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (target / INDEX_NAME).write_text(json.dumps(index, indent=1))
