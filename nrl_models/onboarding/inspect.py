"""Describe a checkpoint from its configuration and file headers, without reading weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.walk import parts, values_of_layers
from nrl_models.common.gguf.gguf_files import open_files
from nrl_models.common.modules import input_embeddings
from nrl_models.common.projections import declared_groups
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.family import FamilyModel
from nrl_models.loading.read_config import read_config

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config keys of the number of experts."""

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok"),
)
"""Configuration keys of the sizes that are shown."""


class ModelKind(StrEnum):
    """Kinds of models. A model has one of the first two, and any number of the other kinds."""

    DENSE = "dense"
    MOE = "moe"
    VLM = "vlm"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Contents of a checkpoint.

    Args:
        architecture: The architecture that it loads as.
        model_type: `model_type` of the configuration.
        class_model_type: `model_type` of the architecture's own configuration class. Differs if transformers has no
            class for this model type and uses another one's.
        family: Module of its family; None if it falls back to transformers' class.
        kinds: Kinds of the model.
        sizes: Sizes of the (text) model by configuration key; a list if layers differ.
        tied: Whether input and output embeddings are tied.
        flags: Names of the family's `ModelFlag`s.
        groups: Number of fused groups of each kind, written `Class: a + b`.
        parameters: Number of parameters, counting tied ones once.
        stored_tensors: Number of tensors in the files; None if there are none.
        stored_bytes: Size of these tensors.
        dtypes: Number of stored tensors by dtype, or by GGUF type.
        embedding_rows: Rows of the stored input embeddings; None if the files have no tensor of that name. If they
            differ from `vocab_size`, loading raises `CheckpointError`.
        mtp_announced: Number of MTP layers in the configuration.
        mtp_tensors: Number of stored MTP tensors.
        mtp_bytes: Size of these tensors.
    """

    architecture: str
    model_type: str
    class_model_type: str
    family: str | None
    kinds: tuple[ModelKind, ...]
    sizes: dict[str, int | list[int]]
    tied: bool
    flags: tuple[str, ...]
    groups: dict[str, int]
    parameters: int
    stored_tensors: int | None
    stored_bytes: int | None
    dtypes: dict[str, int]
    embedding_rows: int | None
    mtp_announced: int
    mtp_tensors: int
    mtp_bytes: int


def inspect(path: str | Path) -> Inspection:
    """Inspect the checkpoint in `path`: a directory with `config.json`, with or without weights, or a GGUF file.

    Raises:
        CheckpointError: If there is no configuration, or files are damaged.
        UnknownArchitectureError: If no class supports the architecture.
    """
    folder = resolve_folder(path)
    auto_class = auto_class_for(folder)
    config = read_config(folder)
    model = auto_class.from_config(config, device="meta")
    has_weights = is_gguf(folder) or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    files = open_files(folder) if has_weights else None
    text = config.get_text_config()
    names = MTPNames(model)
    mtp = [files.tensors[key] for key in names.among(files.tensors)] if files else []
    return Inspection(
        architecture=type(model).__name__,
        model_type=config.model_type,
        class_model_type=getattr(type(model).config_class, "model_type", config.model_type),
        family=type(model).__module__ if isinstance(model, FamilyModel) else None,
        kinds=tuple(kinds_of(config)),
        sizes=_sizes(text),
        tied=bool(model.all_tied_weights_keys),
        flags=tuple(model.flags.names) if isinstance(model, FamilyModel) else (),
        groups=combined_groups(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        stored_tensors=len(files.tensors) if files else None,
        stored_bytes=files.nbytes if files else None,
        dtypes=dict(Counter(files.stored_as(tensor) for tensor in files.tensors.values())) if files else {},
        embedding_rows=_embedding_rows(model, files) if files else None,
        mtp_announced=names.announced if names.known else 0,
        mtp_tensors=len(mtp),
        mtp_bytes=sum(tensor.nbytes for tensor in mtp),
    )


def _embedding_rows(model: PreTrainedModel, files: CheckpointFiles) -> int | None:
    """Return the number of rows of the stored tensor with the last two parts of the embedding weight's name."""
    weight = getattr(input_embeddings(model), "weight", None)
    names = [".".join(name.split(".")[-2:]) for name, parameter in model.named_parameters() if parameter is weight]
    stored = [tensor for key, tensor in files.tensors.items() if names and key.endswith(names[0])]
    return int(stored[0].shape[0]) if len(stored) == 1 else None


def _sizes(config: PreTrainedConfig) -> dict[str, int | list[int]]:
    sizes: dict[str, int | list[int]] = {}
    for key in SIZES:
        values = [value for value in values_of_layers(config, key) if isinstance(value, int)]
        if values:
            sizes[key] = values[0] if len(values) == 1 else values
    return sizes


def kinds_of(config: PreTrainedConfig) -> list[ModelKind]:
    """Return the kinds of model that a configuration describes."""
    text: Any = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    is_listed = "mlp" not in layer_types or "moe" in layer_types  # a list with MLPs also lists mixtures
    has_experts = is_listed and any(count > 1 for count in expert_counts(config))
    kinds = [ModelKind.MOE if has_experts else ModelKind.DENSE]
    if getattr(config, "vision_config", None) is not None:
        kinds.append(ModelKind.VLM)
    if "linear_attention" in layer_types or any("attention" not in name for name in layer_types - {"hybrid"}):
        kinds.append(ModelKind.HYBRID)
    return kinds


def expert_counts(config: PreTrainedConfig) -> list[int]:
    """Return the numbers of experts that a configuration states."""
    text = config.get_text_config()
    described = (text, *parts(text).values())  # some have a nested configuration of their experts
    return [value for part in described for key in EXPERT_KEYS if (value := getattr(part, key, None)) is not None]


def combined_groups(model: torch.nn.Module) -> dict[str, int]:
    """Return the number of layers with each group of linears, by `Class: a + b`."""
    return dict(
        Counter(
            f"{type(model.get_submodule(owner)).__name__}: {' + '.join(linears)}"
            for owner, _, linears in declared_groups(model)
        )
    )
