"""Apply transformers' conversions to one layer of each kind, and copy the result to all similar layers.

The tensor names of a large model follow few patterns with many numbers: the 45,395 tensors of DeepSeek-V3 have 36
patterns. A conversion is a regular expression over names, with operations on shapes. Conversions of transformers do not
depend on the layer number, which is checked first. Every name is converted separately if:

- an expression contains a number,
- a conversion counts or keeps state,
- an operation is not from transformers, or
- the results for several numbers differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import torch

from nrl_models.common.upstream_conversions import PrefixChange, WeightConverter, WeightRenaming, patterns_of
from nrl_models.common.views.view import HFTensor, Piece, View

_INDEX = re.compile(r"(?<![^.])([0-9]+)(?![^.])")
"""A component of a name that is a number: a layer's, an expert's."""

_ESCAPE = re.compile(r"\\.")
_LITERAL_INDEX = re.compile(r"(?<![A-Za-z_0-9])[0-9]")
_PLAIN = (WeightRenaming, WeightConverter, PrefixChange)
"""Conversions that treat each name individually. Others of transformers' count, or keep state."""


def ignore_indices(conversions: Iterable[Any]) -> bool:
    """Return True if `conversions` treat names equally that differ only in numbers with the same count of digits.

    A regular expression without digits and back-references cannot distinguish digits. A digit directly after a letter
    (`w1`) is allowed, because numbers of layers and experts follow a dot.
    """
    return all(
        type(conversion) in _PLAIN
        and all(
            type(operation).__module__ == WeightConverter.__module__
            for operation in getattr(conversion, "operations", ())
        )
        and not re.search(r"\\[1-9]", conversion.compiled_sources.pattern)
        and not any(_LITERAL_INDEX.search(_ESCAPE.sub(".", pattern)) for pattern in patterns_of(conversion))
        for conversion in conversions
    )


Layer = tuple[str, str]
"""The text before a name's first number, and that number: `("model.layers.", "5")`."""

Table = dict[str, HFTensor]


def layer_of(name: str) -> Layer | None:
    """Return the layer that a name belongs to; None if it has no number."""
    match = _INDEX.search(name)
    return (name[: match.start()], match.group()) if match else None


def convert_by_layer(
    tensors: Mapping[str, HFTensor], dtype_of: Callable[[str], torch.dtype], convert: Callable[[Table], Table]
) -> Table:
    """Apply `convert` to `tensors`, but convert only two layers of each kind.

    Layers are of the same kind if their tensors only differ in the layer number: names, shapes, dtypes and views.

    Args:
        tensors: Tensors by name.
        dtype_of: Returns the dtype of an own tensor by name.
        convert: Converts a table with conversions for which `ignore_indices` holds.
    """
    kinds = _kinds(tensors, dtype_of)
    left_out = {layer for like in kinds for layer in like[1:-1]}
    if not left_out:
        return convert(dict(tensors))
    converted = convert({name: tensor for name, tensor in tensors.items() if layer_of(name) not in left_out})
    return _for_all(converted, kinds) or convert(dict(tensors))


def _kinds(tensors: Mapping[str, HFTensor], dtype_of: Callable[[str], torch.dtype]) -> list[list[Layer]]:
    """Group the layers by kind, in the order of their numbers."""
    inside: dict[Layer, list[Any]] = defaultdict(list)
    for name, tensor in tensors.items():
        layer = layer_of(name)
        if layer is not None:
            start = len("".join(layer))
            places = tuple(
                (_within(layer, piece.view.parameter), piece.view.steps, piece.region) for piece in tensor.pieces
            )
            inside[layer].append((name[start:], tensor.shape, dtype_of(tensor.parameters[0]), places))
    kinds: dict[Any, list[Layer]] = defaultdict(list)
    for layer, content in inside.items():
        stack, index = layer
        kinds[stack, len(index), tuple(content)].append(layer)
    return [sorted(like, key=lambda layer: int(layer[1])) for like in kinds.values()]


def _within(layer: Layer, name: str) -> str | tuple[str, ...]:
    """Return the rest of a name inside `layer`. Names elsewhere stay complete, which makes layers differ."""
    prefix = "".join(layer)
    return name.removeprefix(prefix) if name.startswith(f"{prefix}.") else (*layer, name)


def _for_all(converted: Table, kinds: list[list[Layer]]) -> Table | None:
    """Derive the complete table from two layers of each kind, in order; None if that is not possible."""
    blocks: dict[Layer, list[HFTensor]] = {}
    for layer, group in groupby(converted.values(), key=_only_layer):
        if layer is _SEVERAL or layer in blocks:
            return None
        blocks[layer or (f"outside {len(blocks)}", "0")] = list(group)
    stacks = [stack for stack, _ in groupby(stack for stack, _ in blocks)]
    positions = {stack: position for position, stack in enumerate(stacks)}
    if len(positions) < len(stacks):
        return None
    for like in kinds:
        first, last = blocks.get(like[0], []), blocks.get(like[-1], [])
        if [_moved(tensor, like[0], like[-1]) for tensor in first] != last:
            return None
        blocks |= {layer: [_moved(tensor, like[0], layer) for tensor in first] for layer in like[1:-1]}
    in_order = sorted(blocks, key=lambda layer: (positions.get(layer[0], 0), int(layer[1])))
    tensors = [tensor for layer in in_order for tensor in blocks[layer]]
    result = {tensor.name: tensor for tensor in tensors}
    return result if len(result) == len(tensors) else None


_SEVERAL: Any = ("", "")
"""Layer of a tensor that consists of parameters of several layers."""


def _only_layer(tensor: HFTensor) -> Layer | None:
    layers = {layer_of(parameter) for parameter in tensor.parameters}
    return next(iter(layers)) if len(layers) == 1 else _SEVERAL


def _moved(tensor: HFTensor, first: Layer, layer: Layer) -> HFTensor:
    """Return a tensor of layer `first` renamed to another layer of the same kind."""
    before, after = "".join(first), "".join(layer)
    pieces = tuple(
        Piece(View(after + piece.view.parameter.removeprefix(before), piece.view.steps), piece.region)
        for piece in tensor.pieces
    )
    return HFTensor(_INDEX.sub(layer[1], tensor.name, count=1), tensor.shape, pieces)
