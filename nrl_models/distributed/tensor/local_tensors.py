"""Modules that compute on this rank's plain tensors, and conversion of modules to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel

from nrl_models.common.cached import cached

_SUMMED_OVER = "gradients_summed_over"
_NOTHING: Mapping[str, str] = MappingProxyType({})


class OnLocalTensors(nn.Module):
    """Mixin that replaces all parameters in this module by this rank's plain tensors during its forward.

    The module's code and its submodules run on plain tensors without overhead per operation. Gradients are DTensors
    with the parameters' placements.

    Attributes:
        is_unit: Whether `fsdp` gathers the module separately. Before that, no code may read its parameters, including
            parent modules.
    """

    is_unit: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on local tensors. Same arguments and results."""
        return _run_on_local_tensors(self, super().forward, args, kwargs)


@torch.compiler.disable(recursive=False)
def _run_on_local_tensors(module: OnLocalTensors, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the forward. Never compiled, because it replaces parameters; the functions that it calls are compiled."""
    with _local_tensors(module):
        return forward(*args, **kwargs)


@contextmanager
def _local_tensors(module: OnLocalTensors) -> Iterator[None]:
    replaced: list[tuple[dict[str, Any], str, DTensor, str | None]] = []
    for inner in _modules_within(module):
        parameters: dict[str, Any] = inner._parameters
        summed_over: Mapping[str, str] = vars(inner).get(_SUMMED_OVER, _NOTHING)
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                replaced.append((parameters, name, parameter, summed_over.get(name)))
    try:
        for parameters, name, parameter, dimension in replaced:
            parameters[name] = _local(parameter, dimension)
        yield
    finally:
        for parameters, name, parameter, _ in replaced:
            parameters[name] = parameter


def _modules_within(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module` and its submodules, whose weights its code may read without calling them, except units."""
    yield module
    for child in module.children():
        if not (isinstance(child, OnLocalTensors) and child.is_unit):
            yield from _modules_within(child)


def _local(parameter: DTensor, summed_over: str | None) -> torch.Tensor:
    if summed_over is None:
        return parameter.to_local()
    # Redistribute to the current placements: identity in the forward, sum over ranks in the backward.
    names = parameter.device_mesh.mesh_dim_names or ()
    shares = [
        Partial() if name == summed_over else placement
        for name, placement in zip(names, parameter.placements, strict=True)
    ]
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=shares)


def sum_gradients_over(module: nn.Module, dimensions: Mapping[str, str]) -> None:
    """Sum gradients of a module's own parameters over ranks, also in deep copies of the module.

    Args:
        module: The module.
        dimensions: Mesh dimension by name, for parameters of which each rank computes a part of the gradient.
    """
    vars(module)[_SUMMED_OVER] = dimensions


def become(module: nn.Module, *mixins: type[nn.Module]) -> None:
    """Change `module`'s class to one with `mixins` before it: the same object, and a class of the same name."""
    module.__class__ = _mixed(type(module), mixins)


def unsharded_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of a model before it was sharded, without mixins and without FSDP's class."""
    return next(
        cls
        for cls in type(model).__mro__
        if issubclass(cls, PreTrainedModel) and not issubclass(cls, FSDPModule) and "mixed_into" not in vars(cls)
    )


@cached
def _mixed(cls: Any, mixins: tuple[type[nn.Module], ...]) -> Any:
    @wraps(cls.forward)  # `generate` and trainers inspect the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super(mixed, self).forward(*args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    mixed: Any = type(cls.__name__, (*mixins, cls), names | {"forward": forward, "mixed_into": cls, "mixins": mixins})
    return mixed
