"""A group: linears that read the same input, computed in one matmul wherever the result is the same.

The linears stay what they are: `nn.Linear`s with parameters of their own, under their own names. While their owner's
forward runs, the group answers their calls: the first call computes all of them, the others take their slice. It does
so only where separate calls would give the same; else each linear computes itself, as it does at any other time.

Obstacles are checked in four places:

- `obstacle`: what keeps weights from being neighbours in memory. Checked when weights are put side by side, and by
  `report`.
- `wrapped`: wrappers around linears, whose code would run between their calls.
- `begin`: what cannot change during the owner's forward: types and hooks.
- `Run.take`: what can: the place of the weights, the input and its version, each weight and its version, and modes that
  code around a single call may set.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nrl_models.common.projections.group_memory import JoinedWeights, Layout
from nrl_models.common.projections.matmul import joined_linear
from nrl_models.common.projections.memory import Buffer, owns_storage
from nrl_models.common.projections.obstacles import Obstacle, ObstacleKind
from nrl_models.common.projections.run import Answer, OwnForward, Run
from nrl_models.common.upstream_torch import (
    DisableTorchFunction,
    disable_current_modes,
    functorch_transforms_are_active,
    saved_tensors_hooks,
)

KINDS = ("weight", "bias")

_LINEAR, _LINEAR_FORWARD = F.linear, nn.Linear.forward
"""What linears compute; where these are patched globally, linears compute themselves."""

_saved_tensors_hooks = saved_tensors_hooks

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LinearGroup(nn.Module):
    """Linears of one module that read the same input.

    A module without parameters, which its owner does not register: code that walks the model does not see it. It gives
    sharding and profilers a place to act: every joined matmul is a call of it.

    Args:
        linears: the linears by name, in the order their rows take.

    Attributes:
        names: the names of all linears, in the order of their rows, including those that were replaced.
        always_answers: whether the group answers its linears' calls even where it computes them one by one, because a
            subclass processes their input.
    """

    always_answers: bool = False

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        self._set_linears(linears)
        self.join()

    def _set_linears(self, linears: Mapping[str, nn.Linear]) -> None:
        self.names = tuple(linears)
        # Weak, so that a linear that is replaced (by a quantised one, say) is freed with its weights.
        self._references = tuple(weakref.ref(linear) for linear in linears.values())
        self._types: tuple[type[nn.Module], ...] = (nn.Linear,) * len(linears)
        self._answers = tuple(Answer(self, number) for number in range(len(linears)))
        for linear in linears.values():
            if isinstance(linear.__dict__.get("forward"), OwnForward):  # copied while the original's group answered
                del linear.__dict__["forward"]
        self._layout: Layout | None = None
        self._run: Run | None = None
        self._busy = Lock()  # held while a run is on
        self._uncalled: tuple[str, ...] = ()

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """The linears by name, in the order of their rows, without those that were replaced."""
        pairs = zip(self.names, (linear() for linear in self._references), strict=True)
        return {name: linear for name, linear in pairs if linear is not None}

    @property
    def weight(self) -> torch.Tensor:
        """All weights, `(C, I)`, detached: the memory itself while they are neighbours, else a copy."""
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
        """Put the linears' weights, and their biases, side by side in memory, unless there is an `obstacle`.

        The parameters stay the same objects, with the same values. Weights that are neighbours already stay where they
        are. Memory that is also referenced elsewhere is left alone: a state dict that was assigned, and is still held.

        Returns:
            Whether it is worth trying again later: a parameter's memory is referenced elsewhere, or a transform of
            `torch.func` is active.
        """
        self._layout, self._uncalled = None, ()
        if self.obstacle():
            return False
        if functorch_transforms_are_active():
            return True
        # Modes that are active around this (inference mode, fake tensors, operation counters) must not affect it.
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction(), disable_current_modes():
            return self._put_side_by_side()

    def _put_side_by_side(self) -> bool:
        buffers = {}
        for kind, parameters in self._parameters_by_kind().items():
            tensors: list[torch.Tensor] = [self.memory_of(parameter) for parameter in parameters]  # type: ignore[misc]
            buffer = Buffer.of(tensors)
            if buffer is None:
                if not all(owns_storage(tensor) for tensor in tensors):
                    return True
                buffer = Buffer(torch.cat([tensor.detach() for tensor in tensors]), [len(tensor) for tensor in tensors])
                for parameter, neighbour in zip(parameters, buffer.neighbours(), strict=True):
                    self.set_memory(parameter, neighbour)
            buffers[kind] = buffer
        self._layout = Layout(buffers["weight"], buffers.get("bias"))
        return False

    @property
    def is_joined(self) -> bool:
        """Whether `join` has put the linears' weights side by side; they may have been moved since."""
        return self._layout is not None

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this process has of a parameter."""
        return parameter

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A parameter as a plain tensor over its memory in this process; None if it has none that can be exchanged."""
        return parameter if type(parameter) is nn.Parameter else None

    def set_memory(self, parameter: torch.Tensor, neighbour: torch.Tensor) -> None:
        """Make `neighbour`, of the same values, the memory of a parameter."""
        parameter.data = neighbour

    def accept_classes(self) -> None:
        """Treat the linears' present classes as linears: the caller knows what they compute."""
        self._types = tuple(type(linear) for linear in self.linears.values())

    def has_its_linears(self) -> bool:
        """Whether every linear is still there, and of the class it had."""
        return all(type(linear()) is expected for linear, expected in zip(self._references, self._types, strict=True))

    def obstacle(self) -> Obstacle | None:
        """Why the linears' parameters cannot be neighbours in memory; None if they can."""
        linears = self.linears
        if lost := [name for name in self.names if name not in linears]:
            return Obstacle(ObstacleKind.REPLACED, f"replaced: {', '.join(lost)}")
        for (name, linear), expected in zip(linears.items(), self._types, strict=True):
            if type(linear) is not expected:
                return Obstacle(ObstacleKind.CLASS, f"{name} is a {type(linear).__name__}")
            for kind in KINDS:
                parameter = linear._parameters.get(kind)
                if kind == "weight" and parameter is None:
                    return Obstacle(ObstacleKind.PARAMETER, f"{name} has no weight of its own")
                if parameter is not None and (why := _unfit(parameter, self.memory_of(parameter))):
                    return Obstacle(ObstacleKind.PARAMETER, f"the {kind} of {name} {why}")
        facts: dict[str, dict[str, Any]] = {
            "input size": {name: linear.weight.shape[1] for name, linear in linears.items()},
            "dtype": {name: linear.weight.dtype for name, linear in linears.items()},
            "device": {name: linear.weight.device for name, linear in linears.items()},
            "having a bias": {name: linear._parameters.get("bias") is not None for name, linear in linears.items()},
        }
        for what, values in facts.items():
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{name} {value}" for name, value in values.items())
                return Obstacle(ObstacleKind.UNLIKE, f"linears disagree in {what}: {listed}")
        parameters = [parameter for kind in self._parameters_by_kind().values() for parameter in kind]
        if len(set(map(id, parameters))) < len(parameters):
            return Obstacle(ObstacleKind.SHARED, "linears share a parameter")
        if len({parameter.dtype for parameter in parameters}) > 1:
            return Obstacle(ObstacleKind.UNLIKE, "weights and biases differ in dtype")
        return None

    def wrapped(self, owner: nn.Module) -> list[str]:
        """Return the names under which `owner` has something else than the group's linears, such as a wrapper of one.

        A wrapper may change weights between the calls of the linears without a trace: PEFT unmerges adapters by
        `weight.data -= delta` when the wrapped linear is called.
        """
        pairs = zip(self.names, self._references, strict=True)
        return [name for name, linear in pairs if owner._modules.get(name) is not linear()]

    def why_separate(self, owner: nn.Module | None = None) -> Obstacle | None:
        """Why the linears compute themselves at present; None if they run as one matmul.

        Args:
            owner: The module whose forward calls the linears; None leaves out what stands between them.
        """
        if obstacle := self.obstacle():
            return obstacle
        if owner is not None and (wrapped := self.wrapped(owner)):
            kinds = ", ".join(f"{name} (in a {type(owner._modules.get(name)).__name__})" for name in wrapped)
            return Obstacle(ObstacleKind.WRAPPED, f"wrapped, so that other code runs between their calls: {kinds}")
        if not self._are_neighbours():
            message = "weights are not side by side in memory: they were moved or replaced (`join` puts them back)"
            return Obstacle(ObstacleKind.MOVED, message)
        linears = self.linears
        for name, linear in linears.items():
            if hooked := [kind for kind in _HOOKS if linear.__dict__[kind]]:
                return Obstacle(ObstacleKind.HOOK, f"{name} has {hooked[0].strip('_').replace('_', ' ')}")
            if "forward" in linear.__dict__ or linear.__dict__.get("_compiled_call_impl") is not None:
                return Obstacle(ObstacleKind.FORWARD, f"the forward of {name} was replaced")
        for kind in KINDS:
            parameters = {name: linear._parameters.get(kind) for name, linear in linears.items()}
            learning = [name for name, found in parameters.items() if found is not None and found.requires_grad]
            if learning and len(learning) < len(linears):
                message = f"of some linears only the {kind} is trained: {', '.join(learning)}"
                return Obstacle(ObstacleKind.TRAINING, message)
        if uncalled := ", ".join(self._uncalled):
            message = f"computed by themselves, or not at all, when others took their slices: {uncalled}"
            return Obstacle(ObstacleKind.UNCALLED, message)
        return None

    def _parameters_by_kind(self) -> dict[str, list[nn.Parameter]]:
        """The linears' weights, and their biases if they have any."""
        kinds = {kind: [linear._parameters.get(kind) for linear in self.linears.values()] for kind in KINDS}
        return {kind: found for kind, found in kinds.items() if None not in found}  # type: ignore[misc]

    def _are_neighbours(self) -> bool:
        """Whether every parameter's memory is where `join` put it."""
        if self._layout is None:
            return False
        kinds = self._parameters_by_kind().values()
        buffers = [Buffer.of([self.memory_of(parameter) for parameter in parameters]) for parameters in kinds]  # type: ignore[misc]
        return all(buffer is not None for buffer in buffers)

    # Computing

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`input`: `(..., I)`. Returns each linear's output `(..., O)`, in their order: in one matmul if possible."""
        return self.outputs_with(input, self.joinable_weights([linear() for linear in self._references]))

    def joinable_weights(self, linears: Sequence[nn.Module | None]) -> JoinedWeights | None:
        """The weights of `linears`, the group's own, if one matmul computes what they would; else None."""
        weights = None if self._layout is None else self._layout.weights_of(linears)
        return weights if weights is not None and weights.learn_alike() else None

    def compute(self, input: torch.Tensor, weights: JoinedWeights | None) -> tuple[torch.Tensor, ...]:
        """Call the group if it has hooks, else only `outputs_with`: hooks for all modules are not to see the group."""
        hooked = self._forward_pre_hooks or self._forward_hooks or self._backward_hooks or self._backward_pre_hooks
        return self(input) if hooked else self.outputs_with(input, weights)

    def outputs_with(self, input: torch.Tensor, weights: JoinedWeights | None) -> tuple[torch.Tensor, ...]:
        """What `forward` returns, the `joinable_weights` being known."""
        if weights is not None and not self.always_answers:
            return joined_linear(input, *weights)
        inputs = self.inputs_of_linears(input)
        if weights is not None and all(each is inputs[0] for each in inputs):
            return joined_linear(inputs[0], *weights)
        linears = [linear._parameters for linear in self.linears.values()]
        return tuple(
            F.linear(each, own["weight"], own.get("bias"))  # type: ignore[arg-type]
            for each, own in zip(inputs, linears, strict=True)
        )

    def inputs_of_linears(self, input: torch.Tensor) -> list[torch.Tensor]:
        """What each linear reads of the group's input: the same tensor, unless a subclass changes it."""
        return [input] * len(self.names)

    def begin(self) -> Run | None:
        """Answer the linears' calls from now on, until `end`; None if that might differ from separate calls.

        While another thread's forward of the owner is answered, this thread's linears compute themselves.
        """
        if self._layout is None and not self.always_answers:
            return None
        # A checkpoint runs the forward again in the backward pass, and compares what both keep: a group that was no
        # longer used then would keep something else. Checkpoints are hooks on saved tensors.
        if self._uncalled and _saved_tensors_hooks(True) is None:
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
        if not self._busy.acquire(blocking=False):  # another thread began since the linears were checked
            return None
        self.__dict__["_run"] = run = Run(self, linears)
        for linear, answer in zip(linears, self._answers, strict=True):
            linear.__dict__["forward"] = answer
        return run

    def end(self, run: Run, *, complete: bool) -> None:
        """Let the linears compute themselves again.

        Args:
            run: what `begin` returned.
            complete: whether the owner's forward returned. If it did without calling some of the linears, the group is
                not used from then on: it would compute what is not needed.
        """
        self.__dict__["_run"] = None
        for linear in run.linears:
            if isinstance(linear.__dict__.get("forward"), Answer):  # not one that was set meanwhile
                del linear.__dict__["forward"]
        if complete and run.left:
            self.__dict__["_uncalled"] = tuple(
                name for name, output in zip(self.names, run.outputs, strict=True) if output is not None
            )
        self._busy.release()

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what holds for this object's memory only."""
        made_here = {"_references", "_answers", "_layout", "_run", "_busy", "_uncalled", "names"}
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
        """What `print(group)` shows."""
        return ", ".join(f"{name}={linear.out_features}" for name, linear in self.linears.items())


def _unfit(parameter: torch.Tensor, memory: torch.Tensor | None) -> str:
    """Why a parameter, of this memory, cannot be a neighbour of others; empty if it can."""
    if memory is None:
        return f"is a {type(parameter).__name__}"
    if memory.device.type == "meta":
        return "has no values (it is on meta)"
    if memory.is_inference():
        return "was made in inference mode"
    if memory.layout is not torch.strided or not memory.is_contiguous() or memory.numel() == 0:
        return "is not contiguous, or empty"
    return ""
