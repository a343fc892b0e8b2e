"""A group: linears that read the same input, computed in one matmul wherever nobody can tell the difference.

The linears stay what they are: `nn.Linear`s with parameters of their own, under their own names. While their owner's
forward runs, the group answers their calls: the first one computes all of them, the others take their slice. It does so
only where that is what separate calls would give; else each linear computes itself, as it does at any other time.

What may hinder it is looked at in three places:

- `obstacle`: what keeps weights from being neighbours in memory. Looked at when weights are laid side by side, and by
  `report`.
- `begin`: what cannot change during the owner's forward: types and hooks.
- `_Run.take`: what can: where weights lie, the input and its version, a weight and its version, and modes that code
  around one call may set.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from nrl_models.common.projections.matmul import joined_linear
from nrl_models.common.projections.memory import Buffer, is_its_own

KINDS = ("weight", "bias")

_LINEAR, _LINEAR_FORWARD = F.linear, nn.Linear.forward
"""What parts compute; where somebody patched them for everyone, parts are left to themselves."""

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
        self._answers = tuple(_Answer(self, number) for number in range(len(linears)))
        for linear in linears.values():
            if isinstance(linear.__dict__.get("forward"), _OwnForward):  # copied while the original's group answered
                del linear.__dict__["forward"]
        self._layout: _Layout | None = None
        self._run: _Run | None = None
        self._busy = Lock()  # held while a run is on
        self._uncalled: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts, in the order of their rows, whether they are still there or not."""
        return self._names

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
        weights = self._weights()
        if weights is None:
            return torch.cat([getattr(part, kind).detach() for part in self.parts.values()])
        rows = weights.weight_rows if kind == "weight" else weights.bias_rows
        assert rows is not None
        return rows

    # Memory

    def join(self) -> bool:
        """Lay the parts' weights, and their biases, side by side in memory, unless there is an `obstacle`.

        The parameters stay the same objects, with the same values. Weights that are neighbours already stay where they
        are. Memory that somebody else looks at, too, is left alone: a state dict that was assigned, and is still held.

        Returns:
            Whether it is worth trying again later: somebody else looks at a parameter's memory, or a transform of
            `torch.func` is on.
        """
        self._layout, self._uncalled = None, ()
        if self.obstacle():
            return False
        if torch._C._are_functorch_transforms_active():
            return True
        # Whatever is on around this (inference mode, fake tensors, something that counts operations) is not for it.
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._lay_side_by_side()

    def _lay_side_by_side(self) -> bool:
        buffers = {}
        for kind, parameters in self._parameters_by_kind().items():
            tensors: list[torch.Tensor] = [self.memory_of(parameter) for parameter in parameters]  # type: ignore[misc]
            buffer = Buffer.of(tensors)
            if buffer is None:
                if not all(is_its_own(tensor) for tensor in tensors):
                    return True
                buffer = Buffer(torch.cat([tensor.detach() for tensor in tensors]), [len(tensor) for tensor in tensors])
                for parameter, neighbour in zip(parameters, buffer.neighbours(), strict=True):
                    self.lay(parameter, neighbour)
            buffers[kind] = buffer
        self._layout = _Layout(buffers["weight"], buffers.get("bias"))
        return False

    @property
    def is_joined(self) -> bool:
        """Whether `join` has laid the parts' weights side by side; they may have been moved since."""
        return self._layout is not None

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A parameter as a plain tensor over its memory in this process; None if it has none that can be exchanged."""
        return parameter if type(parameter) is nn.Parameter else None

    def lay(self, parameter: torch.Tensor, neighbour: torch.Tensor) -> None:
        """Let a parameter have `neighbour`, of the same values, for its memory."""
        parameter.data = neighbour

    def accept_classes(self) -> None:
        """Take the parts' classes, as they are now, for linears: whoever changed them knows what they compute."""
        self._types = tuple(type(linear()) for linear in self._linears)

    def has_its_linears(self) -> bool:
        """Whether every part is there, and of the class it had."""
        return all(type(linear()) is expected for linear, expected in zip(self._linears, self._types, strict=True))

    def obstacle(self) -> str:
        """Why the parts' parameters cannot be neighbours in memory; empty if they can."""
        parts = self.parts
        if lost := [name for name in self._names if name not in parts]:
            return f"replaced: {', '.join(lost)}"
        for (name, part), expected in zip(parts.items(), self._types, strict=True):
            if type(part) is not expected:
                return f"{name} is a {type(part).__name__}"
            for kind in KINDS:
                parameter = part._parameters.get(kind)
                if kind == "weight" and parameter is None:
                    return f"{name} has no weight of its own"
                if parameter is not None and (why := _unfit(parameter, self.memory_of(parameter))):
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
            return f"computed by themselves, or not at all, when others took their slices: {', '.join(self._uncalled)}"
        return ""

    def _parameters_by_kind(self) -> dict[str, list[nn.Parameter]]:
        """The parts' weights, and their biases if they have any."""
        kinds = {kind: [part._parameters.get(kind) for part in self.parts.values()] for kind in KINDS}
        return {kind: found for kind, found in kinds.items() if None not in found}  # type: ignore[misc]

    def _are_neighbours(self) -> bool:
        """Whether every parameter's memory is where `join` laid it."""
        if self._layout is None:
            return False
        kinds = self._parameters_by_kind().values()
        buffers = [Buffer.of([self.memory_of(parameter) for parameter in parameters]) for parameters in kinds]  # type: ignore[misc]
        return all(buffer is not None for buffer in buffers)

    def _weights(self) -> _Weights | None:
        """The parts' weights and the memory that they are, if every one is where `join` laid it; else None.

        Objects may be others: under tensor parallelism a plain tensor over this rank's memory stands for the parameter.
        """
        layout = self._layout
        if layout is None or (weight_rows := layout.rows("weight")) is None:
            return None
        bias_rows = layout.rows("bias")
        if layout.bias_places and bias_rows is None:
            return None
        weights: list[torch.Tensor] = []
        biases: list[torch.Tensor] = []
        dtype = weight_rows.dtype
        for number, reference in enumerate(self._linears):
            part = reference()
            if part is None:
                return None
            parameters = part._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if weight is None or not _is_at(weight, layout.weight_places[number], dtype):
                return None
            weights.append(weight)
            if not layout.bias_places:
                if bias is not None:
                    return None
            elif bias is None or not _is_at(bias, layout.bias_places[number], dtype):
                return None
            else:
                biases.append(bias)
        return _Weights(weights, biases, weight_rows, bias_rows, layout.lengths)

    # Computing

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`input`: `(..., I)`. Returns the parts' outputs, each `(..., O)`, in their order: in one matmul if it can."""
        run = self._run
        weights = None if run is None or run.thread != get_ident() else run.weights
        if weights is None:
            weights = self.joinable_weights()
        if not self.always_answers and weights is not None:
            return joined_linear(input, *weights)
        inputs = self.inputs_of_parts(input)
        if weights is not None and all(each is inputs[0] for each in inputs):
            return joined_linear(inputs[0], *weights)
        parts = [part._parameters for part in self.parts.values()]
        return tuple(
            F.linear(each, own["weight"], own.get("bias"))  # type: ignore[arg-type]
            for each, own in zip(inputs, parts, strict=True)
        )

    def joinable_weights(self) -> _Weights | None:
        """The parts' weights, if one matmul computes what the parts would; else None."""
        weights = self._weights()
        return weights if weights is not None and weights.learn_alike() else None

    def inputs_of_parts(self, input: torch.Tensor) -> list[torch.Tensor]:
        """What each part reads of the group's input: the same tensor, unless a subclass knows better."""
        return [input] * len(self._names)

    def begin(self) -> _Run | None:
        """Answer the parts' calls from now on, until `end`, if that can be what separate calls would give; else None.

        While another thread's forward of the owner is answered, this thread's parts compute themselves.
        """
        if self._uncalled or (self._layout is None and not self.always_answers):
            return None
        if F.linear is not _LINEAR or nn.Linear.forward is not _LINEAR_FORWARD or _is_overridden():
            return None
        parts = []
        for reference, expected in zip(self._linears, self._types, strict=True):
            part = reference()
            if part is None or type(part) is not expected:
                return None
            state = part.__dict__
            if (
                "forward" in state
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or state.get("_compiled_call_impl") is not None
            ):
                return None
            parts.append(part)
        if torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
            return None
        weight = parts[0]._parameters.get("weight")
        if weight is None:
            return None
        run = _Run(self, parts, weight.device.type)
        if run.modes[-1]:  # a transform of torch.func is on
            return None
        if not self._busy.acquire(blocking=False):  # another thread began since the parts were looked at
            return None
        self.__dict__["_run"] = run
        for part, answer in zip(parts, self._answers, strict=True):
            part.__dict__["forward"] = answer
        return run

    def end(self, run: _Run, *, complete: bool) -> None:
        """Let the parts answer their calls themselves again.

        Args:
            run: what `begin` returned.
            complete: whether the owner's forward came to its end. If it did and never called some of the parts, the
                group stays out of the way from then on: it would compute what nobody asks for.
        """
        self.__dict__["_run"] = None
        for part in run.parts:
            if isinstance(part.__dict__.get("forward"), _Answer):  # not what somebody put there meanwhile
                del part.__dict__["forward"]
        if complete and run.left:
            self.__dict__["_uncalled"] = tuple(
                name for name, output in zip(self._names, run.outputs, strict=True) if output is not None
            )
        self._busy.release()

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is only true of this object's memory."""
        made_here = {"_linears", "_answers", "_layout", "_run", "_busy", "_uncalled", "_names"}
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


class _Answer:
    """What a part has for a forward while its group answers its calls."""

    __slots__ = ("group", "number")

    def __init__(self, group: LinearGroup, number: int) -> None:
        self.group, self.number = group, number

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The part's slice of the joined matmul, or what it computes itself."""
        run = self.group._run
        if run is not None and not torch.compiler.is_compiling():
            output = run.take(self.number, input)
            if output is not None:
                return output
        return _OwnForward(self.part)(input)

    @property
    def part(self) -> nn.Linear:
        """The part."""
        part = self.group._linears[self.number]()
        assert part is not None
        return part

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnForward:
        return _OwnForward(memo.get(id(self.part), self.part))

    def __reduce__(self) -> tuple[Any, ...]:
        return _OwnForward, (self.part,)


class _OwnForward:
    """The forward of a part's class: what a copy of a part gets that was made while the part's group answered."""

    __slots__ = ("part",)

    def __init__(self, part: nn.Linear) -> None:
        self.part = part

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """`input` `(..., I)`. Returns `(..., O)`."""
        return type(self.part).forward(self.part, input)


class _Layout:
    """Where the parts' parameters were laid. It does not keep the memory alive: they do.

    Args:
        weights: the buffer of the weights.
        biases: that of the biases, if the parts have some.
    """

    __slots__ = ("bias_places", "biases", "lengths", "weight_places", "weights")

    def __init__(self, weights: Buffer, biases: Buffer | None) -> None:
        self.weights, self.biases = weakref.ref(weights), None if biases is None else weakref.ref(biases)
        self.lengths = weights.lengths
        self.weight_places = weights.places()
        self.bias_places = () if biases is None else biases.places()

    def rows(self, kind: str) -> torch.Tensor | None:
        """The memory of a kind of parameter; None if there is none, or no more."""
        reference = self.weights if kind == "weight" else self.biases
        buffer = None if reference is None else reference()
        return None if buffer is None else buffer.rows


class _Weights(NamedTuple):
    """What `joined_linear` takes beside an input."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    weight_rows: torch.Tensor
    bias_rows: torch.Tensor | None
    lengths: Sequence[int]

    def learn_alike(self) -> bool:
        """Whether all weights need a gradient at present, or none; and all biases, or none."""
        if not torch.is_grad_enabled():
            return True
        for tensors in (self.weights, self.biases):
            learning = [tensor.requires_grad for tensor in tensors]
            if any(learning) and not all(learning):
                return False
        return True


class _Run:
    """One forward of a group's owner, in one thread.

    Attributes:
        outputs: of the last joined matmul, those that are not taken yet.
    """

    __slots__ = (
        "device",
        "group",
        "input",
        "left",
        "modes",
        "outputs",
        "parts",
        "place",
        "seen",
        "thread",
        "version",
        "weights",
    )

    def __init__(self, group: LinearGroup, parts: Sequence[nn.Linear], device: str) -> None:
        self.group, self.parts, self.device = group, parts, device
        self.thread = get_ident()
        self.modes = _modes(self.device)
        self.left = 0
        self.weights: _Weights | None = None  # only while the group is called, so that they are looked at once

    def take(self, number: int, input: torch.Tensor) -> torch.Tensor | None:
        """A part's output for `input`; None if the part has to compute it itself."""
        if type(input) is not torch.Tensor or get_ident() != self.thread or _modes(self.device) != self.modes:
            return None
        if input.is_inference():  # whether it is changed in place before the next part is called cannot be seen
            return None
        if not self.left:
            return self._start(number, input)
        output = self.outputs[number]
        if output is None or input is not self.input or _version(input) != self.version:
            return None
        if input.data_ptr() != self.place or not _is_identical(self.parts[number], self.seen[number]):
            return None
        self.outputs[number] = None
        self.left -= 1
        return output

    def _start(self, number: int, input: torch.Tensor) -> torch.Tensor | None:
        """Compute all parts, if it can be done in one matmul; the others' outputs are there to be taken."""
        group = self.group
        weights = group.joinable_weights()
        if weights is None and not group.always_answers:
            return None
        self.input, self.version, self.place = input, _version(input), input.data_ptr()
        self.seen = [_identity(part) for part in self.parts]
        self.weights = weights
        hooked = group._forward_pre_hooks or group._forward_hooks or group._backward_hooks or group._backward_pre_hooks
        outputs = group(input) if hooked else group.forward(input)  # hooks for all modules are not to see it
        self.weights = None
        self.outputs: list[torch.Tensor | None] = list(outputs)
        self.outputs[number] = None
        self.left = len(outputs) - 1
        return outputs[number]


def _is_at(tensor: torch.Tensor, place: tuple[int, torch.Size], dtype: torch.dtype) -> bool:
    """Whether a plain tensor, or a parameter, is the contiguous memory at `place`, a pointer and a shape."""
    kind = type(tensor)
    return (
        (kind is nn.Parameter or kind is torch.Tensor)
        and tensor.data_ptr() == place[0]
        and tensor.shape == place[1]
        and tensor.dtype is dtype
        and tensor.is_contiguous()
    )


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


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _identity(part: nn.Linear) -> tuple[Any, ...]:
    """What tells a part's weights from others, and from themselves at another time."""
    parameters = part._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None:
        return (None, 0, None, False)
    seen = weight, weight.data_ptr(), _version(weight), weight.requires_grad
    return seen if bias is None else (*seen, bias, bias.data_ptr(), _version(bias), bias.requires_grad)


def _is_identical(part: nn.Linear, seen: tuple[Any, ...]) -> bool:
    """Whether a part's weights are what `_identity` saw. Tensors are compared as objects."""
    now = _identity(part)
    if len(now) != len(seen) or now[0] is not seen[0] or now[1:4] != seen[1:4]:
        return False
    return len(now) == 4 or (now[4] is seen[4] and now[5:] == seen[5:])


def _is_overridden() -> bool:
    """Whether a mode sees calls of torch's functions that may do something else in their place.

    That of `torch.device` and `torch.set_default_device` says only where new tensors are made.
    """
    return _function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


# Bound here, because they are called several times for each group at each call.
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_is_autocast, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_transforms = torch._C._are_functorch_transforms_active


def _modes(device: str) -> tuple[Any, ...]:
    """Whatever is set around a call and changes what it computes or what is kept for the backward pass."""
    return (
        _is_grad_enabled(),
        _is_inference(),
        _autocast_dtype(device) if device != "meta" and _is_autocast(device) else None,
        _function_modes(),
        _dispatch_modes(),
        _saved_tensors_hooks(True),
        _transforms(),
    )
