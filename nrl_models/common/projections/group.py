"""A group: linears that read the same input, computed in one matmul wherever nobody can tell the difference.

The linears stay what they are: `nn.Linear`s with parameters of their own, under their own names. While their owner's
forward runs, the group answers their calls: the first one computes all of them, the others take their slice. It does so
only where that is what separate calls would give; else each linear computes itself, as it does at any other time.

What may hinder it is looked at in three places:

- `obstacle`: what keeps weights from being neighbours in memory. Looked at when weights are laid side by side, and by
  `report`.
- `begin`: what cannot change during the owner's forward without being seen later: types, hooks, where weights lie.
- `_Run.take`: what can: the input and its version, a weight and its version, modes that code around one call may set.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from nrl_models.common.projections.matmul import joined_linear
from nrl_models.common.projections.memory import Buffer, is_its_own

KINDS = ("weight", "bias")

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LinearGroup(nn.Module):
    """Linears of one module that read the same input.

    A module without parameters, which its owner does not register: nothing that walks the model sees it. Sharding and
    profilers have it as one place to act: every joined matmul is a call of it.

    Args:
        linears: the linears by name, in the order their rows take.

    Attributes:
        always_answers: whether the group answers its parts' calls even where it computes them one by one: a subclass
            has something to do with their input.
    """

    always_answers: bool = False

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        self._set_parts(linears)
        self.join()

    def _set_parts(self, linears: Mapping[str, nn.Linear]) -> None:
        self._names = tuple(linears)
        # Weakly, so that a linear that was replaced (by a quantised one, say) takes its weights with it.
        self._linears = tuple(weakref.ref(linear) for linear in linears.values())
        self._types: tuple[type[nn.Module], ...] = (nn.Linear,) * len(linears)
        self._answers = tuple(partial(self._answer, number) for number in range(len(linears)))
        self._buffers: dict[str, weakref.ref[Buffer]] = {}
        self._places: dict[str, tuple[tuple[int, torch.Size], ...]] = {}
        self._dtype: torch.dtype | None = None
        self._run: _Run | None = None
        self._uncalled: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, nn.Linear]:
        """The linears by name, in the order of their rows; those that are no more are left out."""
        pairs = zip(self._names, (linear() for linear in self._linears), strict=True)
        return {name: linear for name, linear in pairs if linear is not None}

    @property
    def weight(self) -> torch.Tensor:
        """All weights, `(C, I)`, detached: the memory itself while they are neighbours, else a copy."""
        return self._rows("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """All biases, `(C,)`, detached, or None."""
        return None if next(iter(self.parts.values())).bias is None else self._rows("bias")

    def _rows(self, kind: str) -> torch.Tensor:
        buffer = self._buffer(kind) if self._are_neighbours() else None
        if buffer is not None:
            return buffer.rows
        return torch.cat([getattr(part, kind).detach() for part in self.parts.values()])

    # Memory

    def join(self) -> bool:
        """Lay the parts' weights, and their biases, side by side in memory, unless there is an `obstacle`.

        The parameters stay the same objects, with the same values. Weights that are neighbours already stay where they
        are. Memory that somebody else looks at, too, is left alone: a state dict that was assigned, and is still held.

        Returns:
            Whether it is worth trying again later, because somebody else looks at a parameter's memory.
        """
        self._buffers, self._places, self._uncalled = {}, {}, ()
        if self.obstacle():
            return False
        for kind, parameters in self._parameters_by_kind().items():
            buffer = Buffer.of(parameters)
            if buffer is None:
                if not all(is_its_own(parameter) for parameter in parameters):
                    self._buffers, self._places = {}, {}
                    return True
                rows = torch.cat([parameter.detach() for parameter in parameters])
                buffer = Buffer(rows, [len(parameter) for parameter in parameters])
                for parameter, neighbour in zip(parameters, buffer.neighbours(), strict=True):
                    parameter.data = neighbour
            self._buffers[kind] = weakref.ref(buffer)
            self._places[kind] = tuple((parameter.data_ptr(), parameter.shape) for parameter in parameters)
            self._dtype = buffer.rows.dtype
        return False

    @property
    def is_joined(self) -> bool:
        """Whether `join` has laid the parts' weights side by side; they may have been moved since."""
        return bool(self._places)

    def obstacle(self) -> str:
        """Why the parts' parameters cannot be neighbours in memory; empty if they can."""
        parts = self.parts
        if lost := [name for name in self._names if name not in parts]:
            return f"{', '.join(lost)} was replaced"
        for (name, part), expected in zip(parts.items(), self._types, strict=True):
            if type(part) is not expected:
                return f"{name} is a {type(part).__name__}"
            for kind in KINDS:
                parameter = part._parameters.get(kind)
                if kind == "weight" and parameter is None:
                    return f"{name} has no weight of its own"
                if parameter is not None and (why := _unfit(parameter)):
                    return f"the {kind} of {name} {why}"
        for what, values in {
            "input size": {name: part._parameters["weight"].shape[1] for name, part in parts.items()},
            "dtype": {name: part._parameters["weight"].dtype for name, part in parts.items()},
            "device": {name: part._parameters["weight"].device for name, part in parts.items()},
            "having a bias": {name: part._parameters.get("bias") is not None for name, part in parts.items()},
        }.items():
            if len(set(values.values())) > 1:
                return f"parts disagree in {what}: {', '.join(f'{name} {value}' for name, value in values.items())}"
        parameters = [parameter for kind in self._parameters_by_kind().values() for parameter in kind]
        if len(set(map(id, parameters))) < len(parameters):
            return "parts share a parameter"
        if len({parameter.dtype for parameter in parameters}) > 1:
            return "weights and biases differ in dtype"
        return ""

    def why_separate(self) -> str:
        """Why the parts compute themselves at present; empty if they run as one matmul."""
        if obstacle := self.obstacle():
            return obstacle
        if not self._are_neighbours():
            return "weights are not side by side in memory: they were moved or replaced (`join` lays them so again)"
        parts = self.parts
        for name, part in parts.items():
            if hooked := [kind for kind in _HOOKS if part.__dict__[kind]]:
                return f"{name} has {hooked[0].strip('_').replace('_', ' ')}"
            if "forward" in part.__dict__ or part.__dict__.get("_compiled_call_impl") is not None:
                return f"the forward of {name} was replaced"
        for kind in KINDS:
            parameters = {name: part._parameters.get(kind) for name, part in parts.items()}
            learning = [name for name, found in parameters.items() if found is not None and found.requires_grad]
            if learning and len(learning) < len(parts):
                return f"of some parts only the {kind} is trained: {', '.join(learning)}"
        if self._uncalled:
            return f"{', '.join(self._uncalled)} did not take its slice when the others did"
        return ""

    def _parameters_by_kind(self) -> dict[str, list[nn.Parameter]]:
        """The parts' weights, and their biases if they have any."""
        kinds = {kind: [part._parameters.get(kind) for part in self.parts.values()] for kind in KINDS}
        return {kind: found for kind, found in kinds.items() if None not in found}  # type: ignore[misc]

    def _buffer(self, kind: str) -> Buffer | None:
        buffer = self._buffers.get(kind)
        return None if buffer is None else buffer()

    def _are_neighbours(self) -> bool:
        """Whether every parameter is where `join` laid it, in whatever object it is held."""
        if not self._places or any(buffer() is None for buffer in self._buffers.values()):
            return False
        has_bias = "bias" in self._places
        for number, reference in enumerate(self._linears):
            part = reference()
            if part is None or not self._is_in_place(part, "weight", number):
                return False
            if not (self._is_in_place(part, "bias", number) if has_bias else part._parameters.get("bias") is None):
                return False
        return True

    def _is_in_place(self, part: nn.Module, kind: str, number: int) -> bool:
        tensor = part._parameters.get(kind)
        # Under tensor parallelism a plain tensor over this rank's memory stands for the parameter during the forward.
        if type(tensor) is not nn.Parameter and type(tensor) is not torch.Tensor:
            return False
        pointer, shape = self._places[kind][number]
        return (
            tensor.data_ptr() == pointer
            and tensor.shape == shape
            and tensor.dtype is self._dtype
            and tensor.is_contiguous()
        )

    # Computing

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`input`: `(..., I)`. Returns the parts' outputs, each `(..., O)`, in their order: in one matmul if it can."""
        parts = list(self.parts.values())
        inputs = self.inputs_of_parts(input)
        weights = [part._parameters["weight"] for part in parts]
        biases = [part._parameters.get("bias") for part in parts]
        if all(each is inputs[0] for each in inputs) and self._learn_alike() and self._are_neighbours():
            weight_rows, bias_rows = self._buffer("weight"), self._buffer("bias")
            assert weight_rows is not None
            return joined_linear(
                inputs[0],
                weight_rows.rows,
                None if bias_rows is None else bias_rows.rows,
                weights,  # type: ignore[arg-type]
                [] if bias_rows is None else biases,  # type: ignore[arg-type]
            )
        return tuple(F.linear(each, weight, bias) for each, weight, bias in zip(inputs, weights, biases, strict=True))

    def inputs_of_parts(self, input: torch.Tensor) -> list[torch.Tensor]:
        """What each part reads of the group's input: the same tensor, unless a subclass knows better."""
        return [input] * len(self._names)

    def _learn_alike(self) -> bool:
        """Whether all weights need a gradient at present, or none; and all biases, or none."""
        if not torch.is_grad_enabled():
            return True
        for kind in self._places:
            learning = [part._parameters[kind].requires_grad for part in self.parts.values()]  # type: ignore[union-attr]
            if any(learning) and not all(learning):
                return False
        return True

    def begin(self) -> bool:
        """Answer the parts' calls from now on, until `end`, if that is what separate calls would give."""
        if not self.always_answers and (not self._places or self._uncalled):
            return False
        parts = []
        for reference, expected in zip(self._linears, self._types, strict=True):
            part = reference()
            if part is None or type(part) is not expected:
                return False
            state = part.__dict__
            if (
                "forward" in state
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or state.get("_compiled_call_impl") is not None
            ):
                return False
            parts.append(part)
        if not (self.always_answers or (self._learn_alike() and self._are_neighbours())):
            return False
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
            return False
        if forward_ad._current_level >= 0:
            return False
        self.__dict__["_run"] = _Run(self, parts)
        for part, answer in zip(parts, self._answers, strict=True):
            part.__dict__["forward"] = answer
        return True

    def end(self, *, complete: bool) -> None:
        """Let the parts answer their calls themselves again.

        Args:
            complete: whether the owner's forward came to its end. If it did and never called some of the parts, the
                group stays out of the way from then on: it would compute what nobody asks for.
        """
        run, self.__dict__["_run"] = self._run, None
        for reference in self._linears:
            if (part := reference()) is not None:
                part.__dict__.pop("forward", None)
        if complete and run is not None and run.outputs is not None:
            left = tuple(name for name, output in zip(self._names, run.outputs, strict=True) if output is not None)
            self.__dict__["_uncalled"] = left

    def _answer(self, number: int, input: torch.Tensor) -> torch.Tensor:
        """A part's output while the group runs: its slice of the joined matmul, or what it computes itself."""
        run = self._run
        if run is not None and not torch.compiler.is_compiling():
            output = run.take(number, input)
            if output is not None:
                return output
        part = self._linears[number]()
        assert part is not None
        return type(part).forward(part, input)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is only true of this object's memory."""
        made_here = {"_linears", "_answers", "_buffers", "_places", "_run", "_uncalled", "_names", "_dtype"}
        state = {name: value for name, value in self.__dict__.items() if name not in made_here}
        return {**state, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        parts, types = state.pop("parts"), state["_types"]
        super().__setstate__(state)
        self._set_parts(parts)
        if len(types) == len(parts):
            self._types = types
        self.join()

    def extra_repr(self) -> str:
        """What `print(group)` shows."""
        return ", ".join(f"{name}={part.out_features}" for name, part in self.parts.items())


class _Run:
    """One forward of a group's owner, in one thread.

    Attributes:
        outputs: of the last joined matmul, those that are not taken yet; None before there is one.
    """

    __slots__ = ("group", "input", "modes", "outputs", "parts", "place", "seen", "thread", "version")

    def __init__(self, group: LinearGroup, parts: Sequence[nn.Linear]) -> None:
        self.group, self.parts = group, parts
        self.thread = get_ident()
        self.modes = _modes(parts[0]._parameters["weight"].device.type)  # type: ignore[union-attr]
        self.outputs: list[torch.Tensor | None] | None = None
        self.input: torch.Tensor | None = None

    def take(self, number: int, input: torch.Tensor) -> torch.Tensor | None:
        """A part's output for `input`; None if the part has to compute it itself."""
        if type(input) is not torch.Tensor or get_ident() != self.thread or _modes(input.device.type) != self.modes:
            return None
        if self.outputs is None or not any(output is not None for output in self.outputs):
            if not (self.group.always_answers or (self.group._are_neighbours() and self.group._learn_alike())):
                return None
            self.input, self.version, self.place = input, _version(input), input.data_ptr()
            self.seen = [_identity(part) for part in self.parts]
            self.outputs = list(self.group(input))
        elif (
            input is not self.input
            or _version(input) != self.version
            or input.data_ptr() != self.place
            or _identity(self.parts[number]) != self.seen[number]
        ):
            return None
        output, self.outputs[number] = self.outputs[number], None
        return output


def _unfit(parameter: torch.Tensor) -> str:
    """Why a parameter cannot be a neighbour of others; empty if it can."""
    if type(parameter) is not nn.Parameter:
        return f"is a {type(parameter).__name__}"
    if parameter.device.type == "meta":
        return "has no values (it is on meta)"
    if parameter.is_inference():
        return "was made in inference mode"
    if parameter.layout is not torch.strided or not parameter.is_contiguous() or parameter.numel() == 0:
        return "is not contiguous, or empty"
    return ""


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _identity(part: nn.Linear) -> tuple[Any, ...]:
    """What tells a part's weights from others, and from themselves at another time."""
    weight, bias = part._parameters["weight"], part._parameters.get("bias")
    assert weight is not None
    seen = (id(weight), weight.data_ptr(), _version(weight), weight.requires_grad)
    return seen if bias is None else (*seen, id(bias), bias.data_ptr(), _version(bias), bias.requires_grad)


def _modes(device: str) -> tuple[Any, ...]:
    """Whatever is set around a call and changes what it computes or what is kept for the backward pass."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._are_functorch_transforms_active(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )
