"""What a checkpoint contains, from its configuration and its files' headers: no weight is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import resolve_folder
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.gguf.gguf_files import open_files
from nrl_models.common.projections import groups_of
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.family import FamilyModel
from nrl_models.loading.read_config import read_config

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of experts."""

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok"),
)
"""The sizes that are shown, by the configuration's own keys."""


class ModelKind(StrEnum):
    """What sort of model a configuration describes; one of the first two, and any of the others."""

    DENSE = "dense"
    MOE = "moe"
    VLM = "vlm"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint contains.

    Args:
        architecture: the architecture it loads as.
        family: the module that serves it; None if it falls back to transformers' own class.
        kinds: what sort of model it is.
        sizes: sizes of the (text) model, by configuration key.
        tied: whether the output embeddings are the input embeddings.
        flags: names of the family's `ModelFlag`s.
        groups: for each kind of combined projection, written `Class: a + b`, how many there are.
        parameters: number of parameters; tied ones once.
        stored_tensors: number of tensors in the files; None if there are none.
        stored_bytes: their size.
        dtypes: number of stored tensors by dtype, of a GGUF file by its own types.
        mtp_announced: layers of multi-token prediction that the configuration announces.
        mtp_tensors: number of stored tensors of multi-token prediction.
        mtp_bytes: their size.
    """

    architecture: str
    family: str | None
    kinds: tuple[ModelKind, ...]
    sizes: dict[str, int]
    tied: bool
    flags: tuple[str, ...]
    groups: dict[str, int]
    parameters: int
    stored_tensors: int | None
    stored_bytes: int | None
    dtypes: dict[str, int]
    mtp_announced: int
    mtp_tensors: int
    mtp_bytes: int


def inspect(path: str | Path) -> Inspection:
    """Look at the checkpoint in `path`: a directory with `config.json`, with or without weights, or a GGUF file.

    Raises:
        CheckpointError: no configuration, or damaged files.
        UnknownArchitectureError: an architecture that no class serves.
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
        family=type(model).__module__ if isinstance(model, FamilyModel) else None,
        kinds=tuple(kinds_of(config)),
        sizes={key: value for key in SIZES if isinstance(value := getattr(text, key, None), int)},
        tied=bool(model.all_tied_weights_keys),
        flags=tuple(model.flags.names) if isinstance(model, FamilyModel) else (),
        groups=combined_groups(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        stored_tensors=len(files.tensors) if files else None,
        stored_bytes=files.nbytes if files else None,
        dtypes=dict(Counter(files.stored_as(tensor) for tensor in files.tensors.values())) if files else {},
        mtp_announced=names.announced if names.known else 0,
        mtp_tensors=len(mtp),
        mtp_bytes=sum(tensor.nbytes for tensor in mtp),
    )


def kinds_of(config: PreTrainedConfig) -> list[ModelKind]:
    """What sort of model a configuration describes."""
    text: Any = config.get_text_config()
    experts = [value for key in EXPERT_KEYS if (value := getattr(text, key, None)) is not None]
    kinds = [ModelKind.MOE if any(value > 1 for value in experts) else ModelKind.DENSE]
    if getattr(config, "vision_config", None) is not None:
        kinds.append(ModelKind.VLM)
    layer_types = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    if "linear_attention" in layer_types or any("attention" not in name for name in layer_types - {"hybrid"}):
        kinds.append(ModelKind.HYBRID)
    return kinds


def combined_groups(model: torch.nn.Module) -> dict[str, int]:
    """The groups of a model, `Class: a + b`, and how many of each it has."""
    return dict(
        Counter(
            f"{type(model.get_submodule(owner)).__name__}: {' + '.join(group.linears)}"
            for owner, _, group in groups_of(model)
        )
    )
