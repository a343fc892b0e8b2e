"""Fuse linears that share an input into one matmul.

The linears remain ordinary `nn.Linear` modules with separate parameters and names. While the parent module's forward
runs, the group intercepts calls to its linears: the first call runs the fused matmul, and later calls return slices of
its output. The group falls back to separate linears whenever fusing could change the result.

Conditions are checked in four places:

- `obstacle`: whether the weights can share one buffer. Checked by `join` and `report`.
- `wrapped`: whether a wrapper's code would run between calls to the linears.
- `begin`: conditions that cannot change during the parent's forward: types and hooks.
- `GroupRun.take`: conditions that can change between calls: the location of the weights, the input and its version, the
  versions of the weights, and modes (gradients, inference, autocast, dispatch).

Shapes: I input features, O output features of a linear, C the sum of all O.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nrl_models.common.projections.matmul import JoinedWeights, joined_linear
from nrl_models.common.projections.memory import Buffer, owns_storage
from nrl_models.common.projections.obstacles import (
    KINDS,
    Obstacle,
    ObstacleKind,
    difference_between,
    hooked_module,
    obstacle_to_calls,
    why_unfit,
)
from nrl_models.common.projections.run import GroupRun, InterceptedForward, OwnForward
from nrl_models.common.upstream_torch import (
    DisableTorchFunction,
    disable_current_modes,
    functorch_transforms_are_active,
    saved_tensors_hooks,
)

_LINEAR, _LINEAR_FORWARD = F.linear, nn.Linear.forward
"""Unpatched functions. If either is patched globally, linears run separately."""


class LinearGroup(nn.Module):
    """Linears of one module that share an input.

    The group is a module without parameters that its parent does not register, so `named_modules()` and `state_dict()`
    are those of transformers. Every fused matmul is a call of the group, on which sharding and profilers can act.

    Args:
        linears: The linears by name, in the order of their rows in the buffer.

    Attributes:
        names: Names of all linears, in the order of their rows, including replaced ones.
        always_answers: Whether to intercept calls even if linears run separately, because a subclass changes inputs.
    """

    always_answers: bool = False

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        self._set_linears(linears)
        self.join()

    def _set_linears(self, linears: Mapping[str, nn.Linear]) -> None:
        self.names = tuple(linears)
        # Weak references, so that a replaced linear (by a quantized one, for example) is freed with its weights.
        self._references = tuple(weakref.ref(linear) for linear in linears.values())
        self._types: tuple[type[nn.Module], ...] = (nn.Linear,) * len(linears)
        self._answers = tuple(InterceptedForward(self, number) for number in range(len(linears)))
        for linear in linears.values():
            if isinstance(linear.__dict__.get("forward"), OwnForward):  # copied during a forward of the original
                del linear.__dict__["forward"]
        self.is_joined = False
        self._run: GroupRun | None = None
        self._busy = Lock()  # held during a run
        self._uncalled: tuple[str, ...] = ()

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """Linears by name, in the order of their rows, without replaced ones."""
        pairs = zip(self.names, (linear() for linear in self._references), strict=True)
        return {name: linear for name, linear in pairs if linear is not None}

    @property
    def weight(self) -> torch.Tensor:
        """All weights, `(C, I)`, detached: a view of the buffer if they are contiguous, else a copy."""
        return self._rows("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """All biases, `(C,)`, detached, or None."""
        return None if next(iter(self.linears.values())).bias is None else self._rows("bias")

    def _rows(self, kind: str) -> torch.Tensor:
        tensors = [self.values_of(getattr(linear, kind).detach()) for linear in self.linears.values()]
        buffer = Buffer.of(tensors)
        return torch.cat(tensors) if buffer is None else buffer.rows

    # Memory

    def join(self) -> bool:
        """Move the linears' weights and biases into one buffer each, unless there is an `obstacle`.

        Parameters keep their identity and values. Weights that are already contiguous stay where they are. Memory with
        other references (an assigned state dict that is still in use) is left alone.

        Returns:
            True if it is worth trying again later, because a parameter's memory has other references or a transform of
            `torch.func` is active.
        """
        self.is_joined, self._uncalled = False, ()
        if self.obstacle():
            return False
        if functorch_transforms_are_active():
            return True
        # Active modes (inference mode, fake tensors, operation counters) must not affect the copy.
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction(), disable_current_modes():
            return self._put_side_by_side()

    def _put_side_by_side(self) -> bool:
        for parameters in self._parameters_by_kind().values():
            tensors: list[torch.Tensor] = [self.memory_of(parameter) for parameter in parameters]  # type: ignore[misc]
            if Buffer.of(tensors) is None:
                if not all(owns_storage(tensor) for tensor in tensors):
                    return True
                buffer = Buffer(torch.cat([tensor.detach() for tensor in tensors]), [len(tensor) for tensor in tensors])
                for parameter, neighbor in zip(parameters, buffer.neighbors(), strict=True):
                    self.set_memory(parameter, neighbor)
        self.is_joined = True
        return False

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a parameter."""
        return parameter

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter as a plain tensor over its memory; None if that memory cannot be replaced."""
        return parameter if type(parameter) is nn.Parameter else None

    def set_memory(self, parameter: torch.Tensor, neighbor: torch.Tensor) -> None:
        """Make a tensor with the same values (a view of the buffer) the memory of a parameter."""
        parameter.data = neighbor

    def accept_classes(self) -> None:
        """Accept the current classes of the linears, which the caller guarantees to compute a linear."""
        self._types = tuple(type(linear) for linear in self.linears.values())

    def has_its_linears(self) -> bool:
        """Return True if no linear was replaced or changed its class."""
        return all(type(linear()) is expected for linear, expected in zip(self._references, self._types, strict=True))

    def obstacle(self) -> Obstacle | None:
        """Return why the parameters cannot share one buffer; None if they can."""
        linears = self.linears
        if lost := [name for name in self.names if name not in linears]:
            return Obstacle(ObstacleKind.REPLACED, f"replaced: {', '.join(lost)}")
        for (name, linear), expected in zip(linears.items(), self._types, strict=True):
            if type(linear) is not expected:
                return Obstacle(ObstacleKind.CLASS, f"{name} is a {type(linear).__name__}")
            for kind in KINDS:
                parameter = linear._parameters.get(kind)
                if kind == "weight" and parameter is None:
                    return Obstacle(ObstacleKind.PARAMETER, f"{name} does not own its weight")
                if parameter is not None and (why := why_unfit(parameter, self.memory_of(parameter))):
                    return Obstacle(ObstacleKind.PARAMETER, f"the {kind} of {name} {why}")
        if difference := difference_between(linears):
            return difference
        parameters = [parameter for kind in self._parameters_by_kind().values() for parameter in kind]
        if len(set(map(id, parameters))) < len(parameters):
            return Obstacle(ObstacleKind.SHARED, "linears share a parameter")
        if len({parameter.dtype for parameter in parameters}) > 1:
            return Obstacle(ObstacleKind.UNLIKE, "weights and biases differ in dtype")
        return None

    def wrapped(self, owner: nn.Module) -> list[str]:
        """Return names of the group's linears that `owner` has replaced by another module, such as a wrapper.

        A wrapper may change weights between calls of the linears without detection. For example, PEFT unmerges adapters
        with `weight.data -= delta` when the wrapped linear is called.
        """
        pairs = zip(self.names, self._references, strict=True)
        return [name for name, linear in pairs if owner._modules.get(name) is not linear()]

    def why_separate(self, owner: nn.Module | None = None) -> Obstacle | None:
        """Return why the linears run separately now; None if they are fused.

        Args:
            owner: Parent module whose forward calls the linears. If None, wrappers between them are not checked.
        """
        if obstacle := self.obstacle():
            return obstacle
        if owner is not None and (wrapped := self.wrapped(owner)):
            kinds = ", ".join(f"{name} (in a {type(owner._modules.get(name)).__name__})" for name in wrapped)
            return Obstacle(ObstacleKind.WRAPPED, f"wrapped, so that other code runs between their calls: {kinds}")
        if not self._are_neighbors():
            message = "weights do not share one buffer: they were moved or replaced (`join` makes them contiguous)"
            return Obstacle(ObstacleKind.MOVED, message)
        if obstacle := obstacle_to_calls(self.linears):
            return obstacle
        if owner is not None and (name := hooked_module(owner)):
            return Obstacle(ObstacleKind.HOOK, f"{name} has forward hooks, which may run between their calls")
        if uncalled := ", ".join(self._uncalled):
            message = f"ran separately, or not at all, while others used the fused matmul: {uncalled}"
            return Obstacle(ObstacleKind.UNCALLED, message)
        return None

    def _parameters_by_kind(self) -> dict[str, list[nn.Parameter]]:
        """Return the linears' weights, and their biases if all have one, by kind."""
        kinds = {kind: [linear._parameters.get(kind) for linear in self.linears.values()] for kind in KINDS}
        return {kind: parameters for kind, parameters in kinds.items() if None not in parameters}  # type: ignore[misc]

    def _are_neighbors(self) -> bool:
        """Return True if all parameters are still at the location where `join` moved them."""
        if not self.is_joined:
            return False
        kinds = self._parameters_by_kind().values()
        buffers = [Buffer.of([self.memory_of(parameter) for parameter in parameters]) for parameters in kinds]
        return all(buffer is not None for buffer in buffers)

    # Computing

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the output `(..., O)` of each linear from an input `(..., I)`, in one matmul if possible."""
        return self.outputs_with(input, self.joinable_weights([linear() for linear in self._references]))

    def joinable_weights(self, linears: Sequence[nn.Module | None]) -> JoinedWeights | None:
        """Return the fused weights of `linears` if one matmul gives the same result; else None."""
        weights = JoinedWeights.of(linears) if self.is_joined else None
        return weights if weights is not None and weights.learn_alike() else None

    def compute(self, input: torch.Tensor, weights: JoinedWeights | None) -> tuple[torch.Tensor, ...]:
        """Call the group if it has hooks, else `outputs_with`, so that global module hooks do not see the group."""
        hooked = self._forward_pre_hooks or self._forward_hooks or self._backward_hooks or self._backward_pre_hooks
        return self(input) if hooked else self.outputs_with(input, weights)

    def outputs_with(self, input: torch.Tensor, weights: JoinedWeights | None) -> tuple[torch.Tensor, ...]:
        """Compute `forward` with known `joinable_weights`."""
        if weights is not None and not self.always_answers:
            return joined_linear(input, *weights)
        inputs = self.inputs_of_linears(input)
        if weights is not None and all(each is inputs[0] for each in inputs):
            return joined_linear(inputs[0], *weights)
        linears = [linear._parameters for linear in self.linears.values()]
        return tuple(
            F.linear(each, parameters["weight"], parameters.get("bias"))  # type: ignore[arg-type]
            for each, parameters in zip(inputs, linears, strict=True)
        )

    def inputs_of_linears(self, input: torch.Tensor) -> list[torch.Tensor]:
        """Return the input of each linear: the same tensor, unless a subclass changes it."""
        return [input] * len(self.names)

    def outputs_at_calls(self, input: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        """Return a function for each linear that computes its output from `input` with its weights at that time."""
        return [partial(OwnForward(linear), input) for linear in self.linears.values()]

    def begin(self) -> GroupRun | None:
        """Intercept the linears' calls until `end`. Returns None if the result might differ from separate calls.

        During a run of another thread, this thread's linears run separately.
        """
        if not self.is_joined and not self.always_answers:
            return None
        # Activation checkpointing, a hook on saved tensors, runs the forward again and compares. It would fail if the
        # group were used only the first time.
        if self._uncalled and saved_tensors_hooks(True) is None:
            return None
        if F.linear is not _LINEAR or nn.Linear.forward is not _LINEAR_FORWARD:
            return None
        linears = []
        for reference, expected in zip(self._references, self._types, strict=True):
            linear = reference()
            if linear is None or type(linear) is not expected:
                return None
            state = linear.__dict__
            if (
                "forward" in state
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or state.get("_compiled_call_impl") is not None
            ):
                return None
            linears.append(linear)
        if not self._busy.acquire(blocking=False):  # another thread has started a run
            return None
        self.__dict__["_run"] = run = GroupRun(self, linears)
        for linear, answer in zip(linears, self._answers, strict=True):
            linear.__dict__["forward"] = answer
        return run

    def end(self, run: GroupRun, *, complete: bool) -> None:
        """Stop intercepting calls.

        Args:
            run: The run that `begin` returned.
            complete: Whether the parent's forward returned. If it did not call some linears, the group is not used
                again, because it would compute unused outputs.
        """
        self.__dict__["_run"] = None
        for linear in run.linears:
            # Unless the forward was replaced during the run.
            if isinstance(linear.__dict__.get("forward"), InterceptedForward):
                del linear.__dict__["forward"]
        if complete and run.left:
            self.__dict__["_uncalled"] = tuple(
                name for name, output in zip(self.names, run.outputs, strict=True) if output is not None
            )
        self._busy.release()

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without references to this object's memory."""
        made_here = {"_references", "_answers", "is_joined", "_run", "_busy", "_uncalled", "names"}
        state = {name: value for name, value in self.__dict__.items() if name not in made_here}
        return {**state, "linears": self.linears}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        linears, types = state.pop("linears"), state["_types"]
        super().__setstate__(state)
        self._set_linears(linears)
        if len(types) == len(linears):
            self._types = types
        self.join()

    def extra_repr(self) -> str:
        """Return the output sizes for `print(group)`."""
        return ", ".join(f"{name}={linear.out_features}" for name, linear in self.linears.items())
