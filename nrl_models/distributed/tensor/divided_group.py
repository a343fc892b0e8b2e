"""Groups of linears whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nrl_models.common.projections import LinearGroup
from nrl_models.common.projections.matmul import JoinedWeights
from nrl_models.distributed.shards import local_of
from nrl_models.distributed.tensor.local_tensors import OnLocalTensors
from nrl_models.distributed.tensor.styles import LinearOfWholeInput, entering


class DividedGroup(LinearGroup):
    """A group whose linears have DTensors as parameters, computed on local tensors.

    The input enters the sharded region once for all sharded linears, so its gradient is reduced once. This rank's
    shards of the weights share one buffer, unless `fsdp` manages their memory.

    Attributes:
        tp_mesh: Ranks that shard the linears; None if none is sharded.
        held_over: Mesh of the linears' DTensors. With `fsdp` they have another mesh, and `fsdp` manages the memory.
        always_answers: Whether a linear is sharded.
    """

    tp_mesh: DeviceMesh | None
    held_over: DeviceMesh

    @staticmethod
    def take_over(group: Any, tp_mesh: DeviceMesh | None, held_over: DeviceMesh) -> None:
        """Convert a group if all its linears read an unsharded input. Otherwise its linears run separately."""
        linears = group.linears.values()
        if not all(_is_linear_of_whole_input(type(linear)) for linear in linears):
            return
        group.__class__ = DividedGroup
        group.tp_mesh, group.held_over = tp_mesh, held_over
        group.always_answers = any(getattr(linear, "is_divided", False) for linear in linears)
        group.accept_classes()
        group.join()

    def outputs_with(self, input: torch.Tensor, weights: JoinedWeights | None) -> tuple[torch.Tensor, ...]:
        """Compute the output of each linear from `input` `(..., I)`, which is equal on every rank."""
        return tuple(
            linear.exchange(output) if isinstance(linear, LinearOfWholeInput) else output
            for linear, output in zip(self.linears.values(), super().outputs_with(input, weights), strict=True)
        )

    def outputs_at_calls(self, input: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        """Return a function for each linear that computes its output, see `LinearGroup`. Enters the region once."""
        pairs = zip(self.linears.values(), self.inputs_of_linears(input), strict=True)
        return [partial(_output_of, linear, each) for linear, each in pairs]

    def inputs_of_linears(self, input: torch.Tensor) -> list[torch.Tensor]:
        """Return the input of each linear. Sharded linears share one input that has entered the sharded region."""
        if not self.always_answers:
            return super().inputs_of_linears(input)
        assert self.tp_mesh is not None
        entered = entering(input, self.tp_mesh)
        return [entered if getattr(linear, "is_divided", False) else input for linear in self.linears.values()]

    def begin(self) -> Any:
        """Intercept calls of the linears, if a parent module has replaced their parameters with local tensors."""
        parameters = [parameter for linear in self.linears.values() for parameter in linear._parameters.values()]
        return None if any(isinstance(parameter, DTensor) for parameter in parameters) else super().begin()

    def join(self) -> bool:
        """Move this rank's shards of the weights into one buffer, see `LinearGroup.join`."""
        if any(type(linear._parameters["weight"]) is torch.Tensor for linear in self.linears.values()):
            return True  # parameters are currently local tensors
        return super().join()

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a DTensor."""
        return local_of(parameter)

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's shard of a DTensor, see `LinearGroup.memory_of`; None if `fsdp` manages its memory."""
        if isinstance(parameter, DTensor):
            return parameter._local_tensor if parameter.device_mesh == self.held_over else None
        return super().memory_of(parameter)

    def set_memory(self, parameter: torch.Tensor, neighbor: torch.Tensor) -> None:
        """Make `neighbor` (a view of the buffer) this rank's shard of a DTensor."""
        if isinstance(parameter, DTensor):
            parameter._local_tensor = neighbor
        else:
            super().set_memory(parameter, neighbor)


def _output_of(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Compute the output of a linear whose input has entered the sharded region."""
    output = F.linear(input, linear.weight, linear.bias)
    return linear.exchange(output) if isinstance(linear, LinearOfWholeInput) else output


def _is_linear_of_whole_input(cls: Any) -> bool:
    """Return True if a class is `nn.Linear`, possibly with mixins that a group supports."""
    while "mixed_into" in vars(cls):
        if not all(issubclass(mixin, LinearOfWholeInput | OnLocalTensors) for mixin in cls.mixins):
            return False
        cls = cls.mixed_into
    return cls is nn.Linear
