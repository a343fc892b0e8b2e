"""Routers: the modules whose scores choose experts.

transformers names most: their output is recorded as `router_logits`. Older versions name none for some models, and for
others the whole block with its experts; there, a router is what stands beside the experts and scores each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd


def routers_of(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """A model's routers: those that transformers declares, and those beside experts of its decoder."""
    found = list(_beside_experts(decoder))
    for module in _declared(model):
        inside = set(module.modules())
        if inside.isdisjoint(found) or module in found:
            found.append(module)
    chosen = set(found)
    return [module for module in model.modules() if module in chosen]


def _declared(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose output transformers records as `router_logits`."""
    recorders: list[tuple[type, str]] = []
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        declared: Any = recorded.get("router_logits", ()) if isinstance(recorded, Mapping) else ()
        for recorder in declared if isinstance(declared, Iterable) else (declared,):
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                recorders.append((target, (getattr(recorder, "layer_name", None) or "").strip(".")))
    for name, module in model.named_modules():
        place = f".{name}."
        if any(isinstance(module, of) and (not part or f".{part}." in place) for of, part in recorders):
            yield module


def _beside_experts(decoder: nn.Module) -> Iterator[nn.Module]:
    for block in decoder.modules():
        counts = {child: _numbers_of_experts(child) for child in block.children()}
        numbers = set().union(*counts.values())
        yield from (child for child, own in counts.items() if not own and numbers and _scores(child, numbers))


def _numbers_of_experts(module: nn.Module) -> set[int]:
    """How many experts a module holds, one tensor for all; with those that compute nothing, too, if it counts them."""
    if any(isinstance(owner, _ConvNd) for owner in module.modules()):
        return set()
    own = list(module.parameters(recurse=False))
    tensors = own or list(module.parameters())
    if not own and any(tensor.ndim != 3 for tensor in tensors):
        return set()  # a block with more than experts
    return {tensor.shape[0] for tensor in tensors if tensor.ndim == 3}


def _scores(module: nn.Module, numbers: set[int]) -> bool:
    """Whether a module's parameters are a matrix with a row for each expert, and what goes with its scores."""
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    rows = {shape[0] for shape in shapes if len(shape) == 2 and shape[0] > 1}
    if len(rows) != 1 or not rows <= numbers:
        return False
    (count,) = rows
    return all(shape in {(), (1,), (count,), (1, count)} or (len(shape) == 2 and shape[0] == count) for shape in shapes)
