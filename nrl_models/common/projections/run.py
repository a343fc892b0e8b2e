"""One forward of a group's owner: its parts' calls are answered from one matmul.

What may change while the owner's forward runs is looked at here, at each call: the thread, the modes that are on, the
input and its version, where weights lie and their versions. All of it happens at each call of each part, so it is
written to be cheap; `CombinedProjections` does without groups in steps of decoding, where it would still be felt.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from nrl_models.common.projections.memory import version_of

if TYPE_CHECKING:
    from nrl_models.common.projections.group import LinearGroup


class Run:
    """One forward of a group's owner, in one thread.

    Args:
        group: the group.
        parts: its linears.

    Attributes:
        begun: the modes in which the forward began.
        modes: those in which the last joined matmul ran.
        outputs: of the last joined matmul, those that are not taken yet; None for the others.
        left: how many are not taken yet.
        thread: where the forward runs.
    """

    __slots__ = ("begun", "group", "input", "left", "modes", "outputs", "parts", "place", "seen", "thread", "version")

    def __init__(self, group: LinearGroup, parts: Sequence[nn.Linear]) -> None:
        self.group, self.parts = group, parts
        self.thread = get_ident()
        self.begun = _modes(parts)
        self.left = 0

    def take(self, number: int, input: torch.Tensor) -> torch.Tensor | None:
        """A part's output `(..., O)` for `input` `(..., I)`; None if the part has to compute it itself."""
        # Whether a tensor of inference mode is changed in place before the next part is called cannot be seen.
        if type(input) is not torch.Tensor or input.is_inference() or get_ident() != self.thread:
            return None
        modes = _modes(self.parts)
        if not self.left:
            # A forward may turn gradients off itself, as indexers of sparse attention do. No more may be different.
            if modes != self.begun and modes != self.begun.without_gradients():
                return None
            self.modes = modes
            return self._start(number, input)
        if modes != self.modes:
            return None
        output = self.outputs[number]
        if output is None or input is not self.input or input._version != self.version:
            return None
        if input.data_ptr() != self.place or not _is_unchanged(self.parts[number], self.seen[number]):
            return None
        self.outputs[number] = None
        self.left -= 1
        return output

    def _start(self, number: int, input: torch.Tensor) -> torch.Tensor | None:
        """Compute all parts, if that is what separate calls would give; the others' outputs are there to be taken."""
        if _is_transformed():
            return None
        group = self.group
        weights = group.joinable_weights(self.parts)
        if weights is None and not group.always_answers:
            return None
        self.look_at(input)
        hooked = group._forward_pre_hooks or group._forward_hooks or group._backward_hooks or group._backward_pre_hooks
        # Hooks for all modules are not to see the group.
        outputs = group(input) if hooked else group.outputs_with(input, weights)
        self.outputs: list[torch.Tensor | None] = list(outputs)
        self.outputs[number] = None
        self.left = len(outputs) - 1
        return outputs[number]

    def look_at(self, input: torch.Tensor) -> None:
        """Remember what the outputs are computed from: the input and the parts' weights, as they are now."""
        self.input, self.version, self.place = input, input._version, input.data_ptr()
        self.seen = [_seen(part) for part in self.parts]


class Answer:
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
        return OwnForward(self.part)(input)

    @property
    def part(self) -> nn.Linear:
        """The part."""
        part = self.group._linears[self.number]()
        assert part is not None
        return part

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnForward:
        return OwnForward(memo.get(id(self.part), self.part))

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnForward, (self.part,)


class OwnForward:
    """The forward of a part's class: what a copy of a part gets that was made while the part's group answered."""

    __slots__ = ("part",)

    def __init__(self, part: nn.Linear) -> None:
        self.part = part

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """`input` `(..., I)`. Returns `(..., O)`."""
        return type(self.part).forward(self.part, input)


_Seen = list[tuple[torch.Tensor, int, int | None, bool] | None]
"""Of a part's parameters, what tells each from others and from itself at another time."""


def _seen(part: nn.Linear) -> _Seen:
    """A part's parameters as they are now."""
    return [
        None if parameter is None else (parameter, parameter.data_ptr(), version_of(parameter), parameter.requires_grad)
        for parameter in part._parameters.values()
    ]


def _is_unchanged(part: nn.Linear, seen: _Seen) -> bool:
    """Whether a part's parameters are what `_seen` saw. Tensors are compared as objects."""
    parameters = part._parameters.values()
    if len(parameters) != len(seen):
        return False
    for now, then in zip(parameters, seen, strict=True):
        if then is None:
            if now is not None:
                return False
        elif (
            now is not then[0]
            or now.data_ptr() != then[1]
            or now.requires_grad is not then[3]
            or version_of(now) != then[2]
        ):
            return False
    return True


# Bound here, because they are called several times for each group at each call.
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_is_any_autocast = torch._C._is_any_autocast_enabled
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_transforms, _tracing_state = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state


def _is_transformed() -> bool:
    """Whether calls of torch's functions are traced, transformed, or may do something else: each part is to be seen.

    The mode of `torch.device` and `torch.set_default_device` says only where new tensors are made.
    """
    if _transforms() or _tracing_state() is not None or forward_ad._current_level >= 0:
        return True
    return _function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


class _Modes(NamedTuple):
    """Whatever is set around a call and changes what it computes or what is kept for the backward pass."""

    learns: bool
    is_inference: bool
    autocast: torch.dtype | None
    function_modes: int
    dispatch_modes: int
    saved_tensors_hooks: Any
    transforms: bool

    def without_gradients(self) -> _Modes:
        """The same within `torch.no_grad()`."""
        return self._replace(learns=False, saved_tensors_hooks=None)


def _modes(parts: Sequence[nn.Linear]) -> _Modes:
    """The modes that are on."""
    learns = _is_grad_enabled()
    return _Modes(
        learns,
        _is_inference(),
        _autocast_dtype(parts) if _is_any_autocast() else None,
        _function_modes(),
        _dispatch_modes(),
        _saved_tensors_hooks(True) if learns else None,
        _transforms(),
    )


def _autocast_dtype(parts: Sequence[nn.Linear]) -> torch.dtype | None:
    """What autocast casts to where the parts are; None where it is off."""
    weight = parts[0]._parameters.get("weight")
    device = "meta" if weight is None else weight.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None
