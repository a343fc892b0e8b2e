"""Modules that compute on their rank's plain tensors, and how a module becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from nrl_models.common.cached import cached


class OnLocalTensors(nn.Module):
    """Mixin: during its forward, every parameter in this module is this rank's plain tensor.

    Whatever the module's code does with its parameters, and those of modules in it, is done on plain
    tensors, at no cost per operation; gradients come back as DTensors of the parameters' placements.

    Attributes:
        summed_over: by `(module, name)` of parameters whose gradient is a share on each rank, the mesh dimension.
        is_unit: whether `fsdp` gathers the module by itself: until then nothing may read its parameters, the modules
            around it included.
    """

    summed_over: Mapping[tuple[int, str], str] = MappingProxyType({})
    is_unit: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and results are the module's own."""
        return _run_on_local_tensors(self, super().forward, args, kwargs)


@torch.compiler.disable(recursive=False)
def _run_on_local_tensors(module: OnLocalTensors, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Not compiled itself, since it replaces parameters; what it calls is."""
    with _local_tensors(module):
        return forward(*args, **kwargs)


@contextmanager
def _local_tensors(module: OnLocalTensors) -> Iterator[None]:
    replaced: list[tuple[dict[str, Any], str, DTensor, str | None]] = []
    for inner in _modules_within(module):
        parameters: dict[str, Any] = inner._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                replaced.append((parameters, name, parameter, module.summed_over.get((id(inner), name))))
    try:
        for parameters, name, parameter, summed_over in replaced:
            parameters[name] = _local(parameter, summed_over)
        yield
    finally:
        for parameters, name, parameter, _ in replaced:
            parameters[name] = parameter


def _modules_within(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and the modules in it, whose weights its code may read without calling them; but not units."""
    yield module
    for child in module.children():
        if not (isinstance(child, OnLocalTensors) and child.is_unit):
            yield from _modules_within(child)


def _local(parameter: DTensor, summed_over: str | None) -> torch.Tensor:
    if summed_over is None:
        return parameter.to_local()
    # Redistributed to the placements it has: nothing happens forward, and backward the shares are summed.
    names = parameter.device_mesh.mesh_dim_names or ()
    shares = [
        Partial() if name == summed_over else placement
        for name, placement in zip(names, parameter.placements, strict=True)
    ]
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=shares)


def become(module: nn.Module, *mixins: type[nn.Module]) -> None:
    """Change `module`'s class to one with `mixins` before it: the same object, and a class of the same name."""
    module.__class__ = _mixed(type(module), mixins)


@cached
def _mixed(cls: Any, mixins: tuple[type[nn.Module], ...]) -> Any:
    @wraps(cls.forward)  # `generate` and trainers look for what a model takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super(mixed, self).forward(*args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    mixed: Any = type(cls.__name__, (*mixins, cls), names | {"forward": forward, "mixed_into": cls, "mixins": mixins})
    return mixed
