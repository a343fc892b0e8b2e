"""Record the inputs and outputs of a model's modules while a forward runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from nrl_models.common.modules import inner_of, innermost
from nrl_models.common.process_state import in_forked_child


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The last call of a module.

    Args:
        inputs: Floating-point tensors in the arguments.
        output: Result of the module.
    """

    inputs: list[torch.Tensor]
    output: Any

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Floating-point tensors in the result."""
        return float_tensors(self.output)


def float_tensors(values: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors among a module's arguments or results."""
    values = list(values) if isinstance(values, (tuple, list)) else [values]
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


@contextmanager
def record_calls(
    model: nn.Module, names: Collection[str] | None = None, *, copy: bool = False
) -> Iterator[dict[str, RecordedCall]]:
    """Record the last call of each module by name, in the order in which modules finish.

    Args:
        model: The model.
        names: Names of the modules to record; default: all.
        copy: Whether to copy tensors, for models that compute in place.
    """
    calls: dict[str, RecordedCall] = {}
    inputs: dict[str, list[torch.Tensor]] = {}
    maybe_clone: Callable[[torch.Tensor], torch.Tensor] = torch.clone if copy else lambda tensor: tensor

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[name] = [maybe_clone(tensor) for tensor in float_tensors([*args, *kwargs.values()])]

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.pop(name, None)
        calls[name] = RecordedCall(inputs.pop(name, []), _copied(output) if copy else output)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if names is None or name in names:
                stack.callback(module.register_forward_pre_hook(partial(before, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(after, name), with_kwargs=True).remove)
        yield calls


@contextmanager
def modules_running(
    model: nn.Module, begins: Callable[[str, nn.Module, tuple[Any, ...]], object]
) -> Iterator[list[str]]:
    """Yield a list with the names of the modules whose forwards are running, outermost first.

    Args:
        model: The model.
        begins: Called before each forward with the module's name, the module and its positional arguments.
    """
    running: list[str] = []

    def enter(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        begins(name, module, args)
        running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield running


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any], *, other_threads: bool = True) -> Iterator[None]:
    """Replace the forward of `module` while the context is open. Its hooks run as usual.

    Args:
        module: The module.
        forward: The new forward.
        other_threads: Whether other threads also call it, as autograd's do when they recompute a checkpointed layer.
    """
    before, original, owner = module.__dict__.get("forward"), module.forward, get_ident()

    def of_thread(*args: Any, **kwargs: Any) -> Any:
        return (forward if get_ident() == owner else original)(*args, **kwargs)

    module.__dict__["forward"] = forward if other_threads else of_thread
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""A lock for each model."""

in_forked_child(_locks.clear)


def one_thread_per_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a model: threads with the same model run it one after another."""

    @wraps(function)
    def locked(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _locks.setdefault(innermost(model), RLock()):  # atomic
            return function(model, *args, **kwargs)

    return locked


def backward_hooks(module: nn.Module) -> int:
    """Return the number of backward hooks and backward pre-hooks of a module."""
    return len(module._backward_hooks) + len(module._backward_pre_hooks)


def code_of(module: nn.Module) -> tuple[int, ...]:
    """Identify the forward hooks of a module, and a forward that replaces its own on the instance."""
    return (*module._forward_pre_hooks, *module._forward_hooks, id(module.__dict__.get("forward")))


def code_around(model: nn.Module) -> tuple[int, ...]:
    """Identify the code of a model and of the models inside it, see `code_of`. Empty if there are several processes."""
    return tuple(code for part in _models_around(model) for code in code_of(part))


def may_act_later(model: nn.Module, module: nn.Module) -> bool:
    """Return True if `module`, or a model around it, has a forward hook, which may change values from some call on.

    False if there are several processes.
    """
    around = _models_around(model)
    return bool(around) and any(part._forward_hooks for part in (*around, module))


def _models_around(model: nn.Module) -> list[nn.Module]:
    """Return a model and the models inside it, outermost first.

    Empty if there are several processes: a hook on only one of them must not make it run the model more often.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return []
    around = [model]
    while (inner := inner_of(around[-1])) is not None:
        around.append(inner)
    return around


@contextmanager
def hooks_that_change(module: nn.Module, *, inputs: bool) -> Iterator[list[str]]:
    """Yield a list of the forward hooks of `module` that change its values by more than their dtype.

    Args:
        module: The module, which runs while the context is open.
        inputs: Whether to list forward pre-hooks that change the first tensor of its input also.
    """
    names: list[str] = []

    def watched(kind: str, hook: Callable[..., Any], index: int) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            before = _copied(values[index])
            result = hook(*values)
            after = values[index] if result is None else result
            if kind == "pre-hook" and len(values) == 3 and result is not None:  # with keyword arguments
                after = result[0]
            pairs = zip(float_tensors(before), float_tensors(after), strict=False)
            if any(_differ(*pair) for pair in pairs):
                names.append(f"forward {kind} {getattr(hook, '__qualname__', type(hook).__name__)}")
            return result

        return run

    with ExitStack() as stack:
        kinds = [("pre-hook", module._forward_pre_hooks, 1)] if inputs else []
        for kind, hooks, index in [*kinds, ("hook", module._forward_hooks, -1)]:
            for key, hook in hooks.items():
                stack.callback(_restore, hooks, key, hook)
                hooks[key] = watched(kind, hook, index)
        yield names


def _restore(hooks: dict[int, Callable[..., Any]], key: int, hook: Callable[..., Any]) -> None:
    if key in hooks:  # a hook may remove itself
        hooks[key] = hook


def _differ(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return True if two tensors differ by more than their dtype."""
    cast = before.to(after.dtype)
    return cast.shape != after.shape or not torch.allclose(cast, after, rtol=0.0, atol=0.0, equal_nan=True)


def _copied(value: Any) -> Any:
    """Copy tensors, also in tuples and lists. Other values are dropped."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copied(item) for item in value] if isinstance(value, (tuple, list)) else None
