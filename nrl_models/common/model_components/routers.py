"""Find the routers of a model: the modules whose scores choose experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from nrl_models.common.modules import is_at
from nrl_models.common.upstream_torch import ConvNd


def routers_of(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """Return modules whose scores choose experts: those declared by transformers, and siblings of a decoder's experts.

    transformers declares most routers: their output is recorded as `router_logits`. Older versions declare none for
    some models, and the complete block for others. There, a router is a sibling of the experts with a score for each.
    """
    routers = list(_beside_experts(decoder))
    for module in _declared_routers(model):
        inside = set(module.modules())
        if inside.isdisjoint(routers) or module in routers:
            routers.append(module)
    chosen = set(routers)
    return [module for module in model.modules() if module in chosen]


def _declared_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules whose output transformers records as `router_logits`."""
    recorders: list[tuple[type, str]] = []
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        declared: Any = recorded.get("router_logits", ()) if isinstance(recorded, Mapping) else ()
        for recorder in declared if isinstance(declared, Iterable) else (declared,):
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                recorders.append((target, (getattr(recorder, "layer_name", None) or "").strip(".")))
    for name, module in model.named_modules():
        if any(isinstance(module, of) and (not layer_name or is_at(name, layer_name)) for of, layer_name in recorders):
            yield module


def _beside_experts(decoder: nn.Module) -> Iterator[nn.Module]:
    for block in decoder.modules():
        counts = {child: _numbers_of_experts(child) for child in block.children()}
        numbers = set().union(*counts.values())
        yield from (
            child for child, child_counts in counts.items() if not child_counts and numbers and _scores(child, numbers)
        )


def _numbers_of_experts(module: nn.Module) -> set[int]:
    """Return the number of experts in a module with stacked experts: the first dimension of its 3D parameters."""
    if any(isinstance(owner, ConvNd) for owner in module.modules()):
        return set()
    direct_parameters = list(module.parameters(recurse=False))
    tensors = direct_parameters or list(module.parameters())
    if not direct_parameters and any(tensor.ndim != 3 for tensor in tensors):
        return set()  # a block with more than experts
    return {tensor.shape[0] for tensor in tensors if tensor.ndim == 3}


def _scores(module: nn.Module, numbers: set[int]) -> bool:
    """Return True if a module's parameters are a matrix with a row per expert, and optional values for its scores."""
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    rows = {shape[0] for shape in shapes if len(shape) == 2 and shape[0] > 1}
    if len(rows) != 1 or not rows <= numbers:
        return False
    (count,) = rows
    return all(shape in {(), (1,), (count,), (1, count)} or (len(shape) == 2 and shape[0] == count) for shape in shapes)
