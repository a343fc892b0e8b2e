"""Sizes of the hub's tensors that transformers concatenates when it loads.

transformers reverts a concatenation into equal parts. If the published parts differ in size, its `save_pretrained`
writes tensors of other shapes. Engines cannot read them, and shape checks reject the published ones. For example,
convolutions of queries, keys and values with 128, 128 and 256 channels are saved with 171, 171 and 170. Families
declare the sizes, which are registered with transformers, so that its own `save_pretrained` is corrected as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from nrl_models.common.upstream_conversions import (
    Concatenate,
    ConversionOps,
    WeightConverter,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

PartSizes = Callable[[PreTrainedConfig], Sequence[int | None]]
"""Function from the text configuration to the size of each part. One size is None: the remaining elements."""


class _JoinParts(Concatenate):
    """`Concatenate` that is reverted into parts of different sizes."""

    def __init__(self, dim: int, sizes: PartSizes) -> None:
        super().__init__(dim)
        self.sizes = sizes

    @property
    def reverse_op(self) -> ConversionOps:
        return _SplitParts(self.dim, self.sizes)


class _SplitParts(ConversionOps):
    """The inverse of `_JoinParts`."""

    def __init__(self, dim: int, sizes: PartSizes) -> None:
        self.dim, self.sizes = dim, sizes

    @property
    def reverse_op(self) -> ConversionOps:
        return _JoinParts(self.dim, self.sizes)

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        (source,) = input_dict.values()
        tensor: torch.Tensor = source[0] if isinstance(source, list) else source
        sizes = list(self.sizes(kwargs["config"].get_text_config()))
        rest = tensor.shape[self.dim] - sum(size for size in sizes if size is not None)
        parts = tensor.split([rest if size is None else size for size in sizes], self.dim)
        return dict(zip(target_patterns, parts, strict=True))


def register_part_sizes(parts: Mapping[str, PartSizes]) -> bool:
    """Correct transformers' conversions of some tensors. Returns False if its version has no such conversions.

    Args:
        parts: Sizes by `"KEY: TARGET"`: transformers' model type or class name of the conversions, and the name of the
            concatenated tensor in memory.
    """
    is_needed = False
    for key_and_target, sizes in parts.items():
        key, _, target = key_and_target.partition(": ")
        conversions = get_checkpoint_conversion_mapping(key) or ()
        corrected = [_corrected(conversion, target, sizes) for conversion in conversions]
        if any(map(_joins, corrected)):
            register_checkpoint_conversion_mapping(key, corrected, overwrite=True)
            is_needed = True
    return is_needed


def equal_parts(conversions: Sequence[Any]) -> list[Any] | None:
    """Return conversions as transformers declares them, with equal parts; None if none are corrected."""
    if not any(map(_joins, conversions)):
        return None
    return [
        _with_operations(conversion, [Concatenate(operation.dim)]) if (operation := _joins(conversion)) else conversion
        for conversion in conversions
    ]


def _corrected(conversion: Any, target: str, sizes: PartSizes) -> Any:
    if not isinstance(conversion, WeightConverter) or target not in conversion.target_patterns:
        return conversion
    (operation,) = conversion.operations
    if type(operation) is not Concatenate:
        return conversion
    return _with_operations(conversion, [_JoinParts(operation.dim, sizes)])


def _joins(conversion: Any) -> _JoinParts | None:
    """Return the corrected operation of a conversion; None if it has none."""
    operations = getattr(conversion, "operations", ())
    return next((operation for operation in operations if isinstance(operation, _JoinParts)), None)


def _with_operations(conversion: Any, operations: list[ConversionOps]) -> Any:
    changed = copy.deepcopy(conversion)
    changed.operations = operations
    return changed
