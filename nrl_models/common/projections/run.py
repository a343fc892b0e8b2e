"""One forward of a group's parent module, in which calls of the linears return slices of one matmul.

Conditions that can change during the parent's forward are checked at each call of each linear: the thread, the active
modes, the input and its version, and the location and versions of the weights. The checks are cheap. When a few
sequences are decoded, their cost would still be noticeable, so `CombinedProjections` does not fuse there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import nn
from torch.autograd import forward_ad

from nrl_models.common.projections.matmul import JoinedWeights
from nrl_models.common.projections.memory import version_of
from nrl_models.common.upstream_torch import (
    DeviceContext,
    count_dispatch_modes,
    count_function_modes,
    function_mode_stack,
    functorch_transforms_are_active,
    is_any_autocast_enabled,
    saved_tensors_hooks,
    tracing_state,
)


class RunnableGroup(Protocol):
    """The part of `LinearGroup` that a run uses."""

    always_answers: bool
    _run: GroupRun | None
    _references: tuple[ref[nn.Linear], ...]

    def joinable_weights(self, linears: Sequence[nn.Module | None], /) -> JoinedWeights | None:
        """Return the weights of `linears` if one matmul gives the same result as separate calls; else None."""

    def compute(self, input: torch.Tensor, weights: JoinedWeights | None, /) -> tuple[torch.Tensor, ...]:
        """Compute each linear's output for `input`."""

    def outputs_at_calls(self, input: torch.Tensor, /) -> list[Callable[[], torch.Tensor]]:
        """Return a function for each linear that computes its output for `input`."""


class GroupRun:
    """One forward of a group's parent module, in one thread.

    Args:
        group: The group.
        linears: The group's linears.

    Attributes:
        at_calls: Whether each linear is computed when it is called, because other code may change its weights before.
        begun: Modes at the start of the forward.
        modes: Modes of the last fused matmul.
        outputs: Outputs of the last fused matmul that were not returned yet, or functions that compute them; None for
            returned ones.
        left: Number of outputs that were not returned yet.
        thread: Thread of the forward.
    """

    __slots__ = (
        "address",
        "at_calls",
        "begun",
        "group",
        "input",
        "left",
        "linears",
        "modes",
        "outputs",
        "seen",
        "thread",
        "version",
    )

    def __init__(self, group: RunnableGroup, linears: Sequence[nn.Linear]) -> None:
        self.group, self.linears = group, linears
        self.thread = get_ident()
        self.begun = _modes(linears)
        self.left = 0
        self.at_calls = False

    def take(self, number: int, input: torch.Tensor) -> torch.Tensor | None:
        """Return a linear's output `(..., O)` for `input` `(..., I)`; None if the linear has to run separately."""
        # In-place changes of an inference-mode tensor between the calls of two linears cannot be detected.
        if type(input) is not torch.Tensor or input.is_inference() or get_ident() != self.thread:
            return None
        modes = _modes(self.linears)
        if not self.left:
            # Forwards may disable gradients, as indexers of sparse attention do. Other differences prevent fusing.
            if modes != self.begun and modes != self.begun.without_gradients():
                return None
            self.modes = modes
            return self._start(number, input)
        if modes != self.modes:
            return None
        output = self.outputs[number]
        if output is None or input is not self.input or input._version != self.version:
            return None
        if input.data_ptr() != self.address:
            return None
        if not self.at_calls and not _is_unchanged(self.linears[number], self.seen[number]):
            return None
        self.outputs[number] = None
        self.left -= 1
        return output if isinstance(output, torch.Tensor) else output()

    def _start(self, number: int, input: torch.Tensor) -> torch.Tensor | None:
        """Run the fused matmul if separate calls would give the same result, and keep the other linears' outputs."""
        if _is_transformed():
            return None
        group = self.group
        weights = group.joinable_weights(self.linears)
        if weights is None and not group.always_answers:
            return None
        self.remember(input)
        outputs = group.outputs_at_calls(input) if self.at_calls else group.compute(input, weights)
        self.outputs: list[torch.Tensor | Callable[[], torch.Tensor] | None] = list(outputs)
        self.outputs[number] = None
        self.left = len(outputs) - 1
        output = outputs[number]
        return output if isinstance(output, torch.Tensor) else output()

    def remember(self, input: torch.Tensor) -> None:
        """Record the input and the current weights of the linears, from which the outputs are computed."""
        self.input, self.version, self.address = input, input._version, input.data_ptr()
        self.seen = [_seen(linear) for linear in self.linears]


class InterceptedForward:
    """Forward of a linear while its group intercepts its calls."""

    __slots__ = ("group", "number")

    def __init__(self, group: RunnableGroup, number: int) -> None:
        self.group, self.number = group, number

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the linear's slice of the fused output, or run the linear separately."""
        run = self.group._run
        if run is not None and not torch.compiler.is_compiling():
            output = run.take(self.number, input)
            if output is not None:
                return output
        return OwnForward(self.linear)(input)

    @property
    def linear(self) -> nn.Linear:
        """The linear whose calls are intercepted."""
        linear = self.group._references[self.number]()
        assert linear is not None
        return linear

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnForward:
        return OwnForward(memo.get(id(self.linear), self.linear))

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnForward, (self.linear,)


class OwnForward:
    """The forward of a linear's class, for copies of a linear that are created while its group intercepts calls."""

    __slots__ = ("linear",)

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Run the forward of the linear's class on `input` `(..., I)`. Returns `(..., O)`."""
        return type(self.linear).forward(self.linear, input)


_Seen = list[tuple[torch.Tensor, int, int | None, bool] | None]
"""Object, address, version and `requires_grad` of each parameter of a linear."""


def _seen(linear: nn.Linear) -> _Seen:
    """Record a linear's current parameters."""
    return [
        None if parameter is None else (parameter, parameter.data_ptr(), version_of(parameter), parameter.requires_grad)
        for parameter in linear._parameters.values()
    ]


def _is_unchanged(linear: nn.Linear, seen: _Seen) -> bool:
    """Return True if a linear's parameters are those recorded by `_seen`. Tensors are compared by identity."""
    parameters = linear._parameters.values()
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


# Cached at module level: these run several times per group per forward pass.
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_is_any_autocast = is_any_autocast_enabled
_function_modes, _dispatch_modes = count_function_modes, count_dispatch_modes
_saved_tensors_hooks = saved_tensors_hooks
_transforms, _tracing_state = functorch_transforms_are_active, tracing_state


def _is_transformed() -> bool:
    """Return True if calls of torch functions are traced, transformed or intercepted, so that linears must be called.

    The mode of `torch.device` and `torch.set_default_device` does not count: it only sets the device of new tensors.
    """
    if _transforms() or _tracing_state() is not None or forward_ad._current_level >= 0:
        return True
    return _function_modes() > 0 and any(type(mode) is not DeviceContext for mode in function_mode_stack())


class _Modes(NamedTuple):
    """All modes around a call that affect its result or the tensors saved for the backward."""

    learns: bool
    is_inference: bool
    autocast: torch.dtype | None
    function_modes: int
    dispatch_modes: int
    saved_tensors_hooks: Any
    transforms: bool

    def without_gradients(self) -> _Modes:
        """Return these modes as they are within `torch.no_grad()`."""
        return self._replace(learns=False, saved_tensors_hooks=None)


def _modes(linears: Sequence[nn.Linear]) -> _Modes:
    """Return the active modes."""
    learns = _is_grad_enabled()
    return _Modes(
        learns,
        _is_inference(),
        _autocast_dtype(linears) if _is_any_autocast() else None,
        _function_modes(),
        _dispatch_modes(),
        _saved_tensors_hooks(True) if learns else None,
        _transforms(),
    )


def _autocast_dtype(linears: Sequence[nn.Linear]) -> torch.dtype | None:
    """Return the autocast dtype of the linears' device, or None if autocast is off."""
    weight = linears[0]._parameters.get("weight")
    device = "meta" if weight is None else weight.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None
