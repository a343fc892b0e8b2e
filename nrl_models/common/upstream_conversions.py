"""transformers' conversions between names and shapes of the hub's tensors and of a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import core_model_loading
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

__all__ = [
    "Chunk",
    "Concatenate",
    "ConversionOps",
    "PrefixChange",
    "Renaming",
    "WeightConverter",
    "WeightRenaming",
    "as_meant",
    "build_glob_alternation",
    "conversions_to_revert",
    "describe_conversion",
    "dot_natural_key",
    "get_checkpoint_conversion_mapping",
    "get_model_conversion_mapping",
    "has_key_mapping",
    "loaded_conversions",
    "patterns_of",
    "register_checkpoint_conversion_mapping",
    "remove_tied_weights_from_state_dict",
    "revert_weight_conversion",
    "set_loaded_conversions",
]


class _NoPrefixChange:
    """Replaces `PrefixChange`, which transformers 5.5 lacks. It has no instances."""


PrefixChange: type = getattr(core_model_loading, "PrefixChange", _NoPrefixChange)
"""The conversion that adds or removes a prefix that only some checkpoints have."""


def loaded_conversions(model: nn.Module) -> list[Any] | None:
    """Return the conversions that a model was loaded with; None if it was not loaded, or none were recorded."""
    return cast("list[Any] | None", getattr(model, "_weight_conversions", None))


def set_loaded_conversions(model: nn.Module, conversions: Sequence[Any] | None) -> None:
    """Record the conversions that a model was loaded with. transformers reverts them when it saves."""
    cast(Any, model)._weight_conversions = conversions


def conversions_to_revert(model: Any) -> list[Any] | None:
    """Return the conversions to revert when a model that stays quantized is saved; None if none were recorded.

    Leaves out conversions that only read a quantizer's format (bitsandbytes, torchao). They cannot be reverted, and the
    quantizer's state dict already has that format.
    """
    loaded = loaded_conversions(model)
    if loaded is None:
        return None
    quantizers = [describe_conversion(conversion) for conversion in model.hf_quantizer.get_weight_conversions()]
    return [each for each in loaded if describe_conversion(each) not in quantizers or _can_revert(each)]


def _can_revert(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


class Renaming:
    """Renames keys by conversions, and records which conversions applied, because saving only reverts these.

    transformers 5.5 does not record this. It reverts all conversions, and so saves `LayerNorm.weight` as
    `LayerNorm.gamma`.
    """

    def __init__(self) -> None:
        self._used: set[int] = set()

    def __call__(self, conversion: Any, key: str) -> tuple[str, str | None]:
        """Apply a conversion to a name. Returns the new name, and the pattern that matched it, or None."""
        renamed, pattern = conversion.rename_source_key(key)
        if pattern is not None:
            self._used.add(id(conversion))
        return renamed, pattern

    def has_used(self, conversion: Any) -> bool:
        """Return True if a conversion, which must still exist, applied to a name."""
        return bool(conversion.was_used() if hasattr(conversion, "was_used") else id(conversion) in self._used)


def as_meant(saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors saved by transformers with the names that 5.5 changes by mistake restored; see `Renaming`."""
    if hasattr(WeightRenaming, "was_used"):
        return dict(saved)
    old = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return {
        next((name.removesuffix(end) + new for end, new in old.items() if name.endswith(end)), name): tensor
        for name, tensor in saved.items()
    }


def patterns_of(conversion: Any) -> tuple[str, ...]:
    """Return all name patterns of a conversion: its sources and targets, as declared and as compiled."""
    return (
        conversion.compiled_sources.pattern,
        *conversion.target_patterns,
        *_declared(conversion),
        f"{_scope(conversion)[0]}.{_scope(conversion)[1]}",
    )


def describe_conversion(conversion: Any) -> tuple[Any, ...]:
    """Return a conversion's type and settings, without its state. Equal for conversions that do the same."""
    operations = [(type(operation), vars(operation)) for operation in getattr(conversion, "operations", ())]
    return type(conversion), *_declared(conversion), _scope(conversion), getattr(conversion, "offset", None), operations


def _declared(conversion: Any) -> tuple[Any, ...]:
    """Return source and target patterns as they were declared; before 5.6 only the processed patterns."""
    sources = getattr(conversion, "_original_source_patterns", conversion.source_patterns)
    targets = getattr(conversion, "_original_target_patterns", conversion.target_patterns)
    return *sources, "to", *targets


def _scope(conversion: Any) -> tuple[str, str]:
    """Return the part of a model that a conversion applies to; before 5.9, the complete model."""
    return getattr(conversion, "scope_prefix", None) or "", getattr(conversion, "base_model_prefix", None) or ""


def has_key_mapping(model_type: str) -> bool:
    """Return True if transformers converts the names of a model type's checkpoints."""
    return bool(get_checkpoint_conversion_mapping(model_type))
