"""Applying transformers' conversions to one layer of each kind, and the result to every layer like it.

A large model's names are few patterns with many numbers in them: DeepSeek-V3's 45,395 tensors have 36. Conversions are
regular expressions over names and operations on shapes, and none of transformers' depends on the layer. Here that is
checked before it is used: an expression with a number in it, a conversion that counts or keeps state, an operation that
is not transformers' own, or a result that differs between several numbers means that every name is converted
individually.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import torch

from nrl_models.common.upstream import PrefixChange, WeightConverter, WeightRenaming, patterns_of
from nrl_models.common.views.view import HFTensor, Piece, View

_INDEX = re.compile(r"(?<![^.])([0-9]+)(?![^.])")
"""A component of a name that is a number: a layer's, an expert's."""

_ESCAPE = re.compile(r"\\.")
_LITERAL_INDEX = re.compile(r"(?<![A-Za-z_0-9])[0-9]")
_PLAIN = (WeightRenaming, WeightConverter, PrefixChange)
"""Conversions that treat each name individually. Others of transformers' count, or keep state."""


def ignore_indices(conversions: Iterable[Any]) -> bool:
    """Whether `conversions` do the same to names that differ only in numbers of equally many digits.

    A regular expression without digits and back-references cannot distinguish digits. A digit right after a letter
    (`w1`) is harmless, too: numbers of layers and experts come after a dot.
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
    """The layer a name is in; None if there is no number in the name."""
    found = _INDEX.search(name)
    return (name[: found.start()], found.group()) if found else None


def convert_by_layer(
    tensors: Mapping[str, HFTensor], dtype_of: Callable[[str], torch.dtype], convert: Callable[[Table], Table]
) -> Table:
    """What `convert` makes of `tensors`, while converting only two layers of every kind.

    Layers are of a kind if their tensors are, but for the layers' number: names, shapes, dtypes, views of parameters.

    Args:
        tensors: by name.
        dtype_of: the dtype of a tensor of the model's own, by name.
        convert: converts a table, by conversions for which `ignore_indices` holds.
    """
    kinds = _kinds(tensors, dtype_of)
    left_out = {layer for like in kinds for layer in like[1:-1]}
    if not left_out:
        return convert(dict(tensors))
    converted = convert({name: tensor for name, tensor in tensors.items() if layer_of(name) not in left_out})
    return _for_all(converted, kinds) or convert(dict(tensors))


def _kinds(tensors: Mapping[str, HFTensor], dtype_of: Callable[[str], torch.dtype]) -> list[list[Layer]]:
    """The layers, those of a kind together, in the order of their numbers."""
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
    """The rest of a name that is in `layer`; a name elsewhere stays whole, so that no other layer is like this one."""
    prefix = "".join(layer)
    return name.removeprefix(prefix) if name.startswith(f"{prefix}.") else (*layer, name)


def _for_all(converted: Table, kinds: list[list[Layer]]) -> Table | None:
    """The whole table from that of two layers of each kind, in its order; None if it cannot be derived from them."""
    blocks: dict[Layer, list[HFTensor]] = {}
    for layer, group in groupby(converted.values(), key=_only_layer):
        if layer is _SEVERAL or layer in blocks:
            return None
        blocks[layer or (f"outside {len(blocks)}", "0")] = list(group)
    stacks = [stack for stack, _ in groupby(stack for stack, _ in blocks)]
    place = {stack: at for at, stack in enumerate(stacks)}
    if len(place) < len(stacks):
        return None
    for like in kinds:
        first, last = blocks.get(like[0], []), blocks.get(like[-1], [])
        if [_moved(tensor, like[0], like[-1]) for tensor in first] != last:
            return None
        blocks |= {layer: [_moved(tensor, like[0], layer) for tensor in first] for layer in like[1:-1]}
    in_order = sorted(blocks, key=lambda layer: (place.get(layer[0], 0), int(layer[1])))
    tensors = [tensor for layer in in_order for tensor in blocks[layer]]
    result = {tensor.name: tensor for tensor in tensors}
    return result if len(result) == len(tensors) else None


_SEVERAL: Any = ("", "")
"""The layer of a tensor that is made of several layers' parameters."""


def _only_layer(tensor: HFTensor) -> Layer | None:
    layers = {layer_of(parameter) for parameter in tensor.parameters}
    return next(iter(layers)) if len(layers) == 1 else _SEVERAL


def _moved(tensor: HFTensor, first: Layer, layer: Layer) -> HFTensor:
    """What a tensor of layer `first` is in another layer of its kind."""
    before, after = "".join(first), "".join(layer)
    pieces = tuple(
        Piece(View(after + piece.view.parameter.removeprefix(before), piece.view.steps), piece.region)
        for piece in tensor.pieces
    )
    return HFTensor(_INDEX.sub(layer[1], tensor.name, count=1), tensor.shape, pieces)
