"""Shapes and dtypes of the tensors that compressed-tensors stores one weight as."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Formats with two values in each byte."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

Shape = tuple[int, ...]


def plain_shape(format_name: str, shapes: Mapping[str, Shape], stated: Shape | None) -> Shape:
    """Return the shape of a dequantized weight.

    Args:
        format_name: Storage format.
        shapes: Shapes of its parts by name.
        stated: Contents of `weight_shape`.
    """
    if stated is not None:
        return stated
    if format_name in FP4_FORMATS:
        *rows, columns = shapes["weight_packed"]
        return (*rows, 2 * columns)
    return shapes["weight"]


def expected_shapes(format_name: str, weights: Any, shape: Shape) -> dict[str, Sequence[Shape]]:
    """Return the shapes that the parts of a weight may have, by name.

    Args:
        format_name: Storage format.
        weights: The package's `QuantizationArgs` of the weight.
        shape: Shape of the dequantized weight.
    """
    rows, columns = shape if len(shape) == 2 else (0, 0)
    strategy = getattr(weights.strategy, "value", weights.strategy)
    if strategy in ("group", "tensor_group"):
        groups = columns // weights.group_size if columns % weights.group_size == 0 else 0
        scales: list[Shape] = [(rows, groups)]
    elif strategy == "block":
        scales = [tuple(math.ceil(size / block) for size, block in zip(shape, weights.block_structure, strict=True))]
    elif strategy == "channel":
        scales = [(rows, 1)]
    else:
        scales = [(1,), (), (1, 1)]
    expected: dict[str, Sequence[Shape]] = {"weight_scale": scales, "weight_zero_point": scales}
    if format_name == "pack-quantized":
        words = math.ceil(columns * weights.num_bits / 32)
        expected["weight_packed"] = [(rows, words)]
        if strategy in ("group", "channel"):
            expected["weight_zero_point"] = [(math.ceil(rows * weights.num_bits / 32), scales[0][1])]
    elif format_name in FP4_FORMATS:
        expected["weight_packed"] = [(rows, columns // 2)]
        expected["weight_global_scale"] = [(1,), ()]
    else:
        expected["weight"] = [shape] if len(shape) == 2 else []
    return expected


def expected_dtypes(format_name: str, weights: Any) -> dict[str, Sequence[torch.dtype]]:
    """Return the dtypes that the parts of a weight may have, by name; see `expected_shapes`."""
    expected: dict[str, Sequence[torch.dtype]] = {"weight_shape": (torch.int32, torch.int64)}
    if format_name in FP4_FORMATS:
        scales: Sequence[torch.dtype] = (torch.float8_e4m3fn if format_name.startswith("nvfp4") else torch.uint8,)
        return expected | {"weight_packed": (torch.uint8,), "weight_scale": scales, "weight_global_scale": FLOATS}
    if format_name == "pack-quantized":
        return expected | {"weight_packed": (torch.int32,), "weight_scale": FLOATS}
    scales = (torch.uint8,) if format_name == "mxfp8-quantized" else FLOATS
    return expected | {"weight": (weights.pytorch_dtype(),), "weight_scale": scales}
