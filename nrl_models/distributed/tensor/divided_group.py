"""Groups of linears whose parameters are divided among ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nrl_models.common.projections import LinearGroup
from nrl_models.common.projections.group_memory import JoinedWeights
from nrl_models.distributed.shards import local_of
from nrl_models.distributed.tensor.local_tensors import OnLocalTensors
from nrl_models.distributed.tensor.styles import LinearOfWholeInput, entering


class DividedGroup(LinearGroup):
    """A group whose linears' parameters are DTensors, computed on local tensors.

    The input enters the divided region once for all linears that are divided, so that its gradient is summed once.
    This rank's shares of the weights are neighbours in memory, unless `fsdp` has them.

    Attributes:
        tp_mesh: the ranks that divide linears; None if none is divided.
        held_over: the mesh of the linears' DTensors. `fsdp` divides them over another, and keeps their memory itself.
        always_answers: whether a linear is divided.
    """

    tp_mesh: DeviceMesh | None
    held_over: DeviceMesh

    @staticmethod
    def take_over(group: Any, tp_mesh: DeviceMesh | None, held_over: DeviceMesh) -> None:
        """Make a group one of these if all its linears read a whole input; else each linear computes itself."""
        linears = group.linears.values()
        if not all(_is_linear_of_whole_input(type(linear)) for linear in linears):
            return
        group.__class__ = DividedGroup
        group.tp_mesh, group.held_over = tp_mesh, held_over
        group.always_answers = any(getattr(linear, "is_divided", False) for linear in linears)
        group.accept_classes()
        group.join()

    def outputs_with(self, input: torch.Tensor, weights: JoinedWeights | None) -> tuple[torch.Tensor, ...]:
        """`input`: `(..., I)`, the same on every rank. Returns what each linear returns."""
        return tuple(
            linear.exchange(output) if isinstance(linear, LinearOfWholeInput) else output
            for linear, output in zip(self.linears.values(), super().outputs_with(input, weights), strict=True)
        )

    def inputs_of_linears(self, input: torch.Tensor) -> list[torch.Tensor]:
        """The input, entered once for all linears that are divided."""
        if not self.always_answers:
            return super().inputs_of_linears(input)
        assert self.tp_mesh is not None
        entered = entering(input, self.tp_mesh)
        return [entered if getattr(linear, "is_divided", False) else input for linear in self.linears.values()]

    def begin(self) -> Any:
        """Answer the linears' calls, if a module around them has replaced parameters by local tensors."""
        parameters = [parameter for linear in self.linears.values() for parameter in linear._parameters.values()]
        return None if any(isinstance(parameter, DTensor) for parameter in parameters) else super().begin()

    def join(self) -> bool:
        """Put this rank's shares of the weights side by side, see `LinearGroup.join`."""
        if any(type(linear._parameters["weight"]) is torch.Tensor for linear in self.linears.values()):
            return True  # parameters are local tensors at present
        return super().join()

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's share of a DTensor."""
        return local_of(parameter)

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This rank's share of a DTensor."""
        if isinstance(parameter, DTensor):
            return parameter._local_tensor if parameter.device_mesh == self.held_over else None
        return super().memory_of(parameter)

    def set_memory(self, parameter: torch.Tensor, neighbour: torch.Tensor) -> None:
        """Make `neighbour` this rank's share of a DTensor."""
        if isinstance(parameter, DTensor):
            parameter._local_tensor = neighbour
        else:
            super().set_memory(parameter, neighbour)


def _is_linear_of_whole_input(cls: Any) -> bool:
    """Whether a class is `nn.Linear` with no mixins but those that a group can compute."""
    while "mixed_into" in vars(cls):
        if not all(issubclass(mixin, LinearOfWholeInput | OnLocalTensors) for mixin in cls.mixins):
            return False
        cls = cls.mixed_into
    return cls is nn.Linear
