"""Which linears read the same input: a fact about a model, found by running it once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nrl_models.common.dtypes import kept_dtypes

Groups = dict[str, list[tuple[str, ...]]]
"""For each module's name the groups of its own linears, by attribute name, that read one input."""


@dataclass(frozen=True)
class Readers:
    """Linears of one module that read the same inputs, the very same tensors, in the same order.

    A view of a tensor is another tensor, though it holds the same numbers: a group knows its input by identity.

    Args:
        owner: name of the module they are in.
        names: their attribute names, in the order of the calls.
        obstacle: why they cannot be combined; empty if they can.
    """

    owner: str
    names: tuple[str, ...]
    obstacle: str = ""


@dataclass(frozen=True)
class Trace:
    """What the linears of a model read in one run.

    Args:
        readers: those that read the same inputs, two or more, in the order of their first calls.
        uncalled: for each module's name its linears that were never called.
    """

    readers: tuple[Readers, ...]
    uncalled: dict[str, tuple[str, ...]]


def trace_groups(model: nn.Module, run: Callable[[], Any]) -> Groups:
    """Run `model` with hooks and group the linears of each module that can be combined: see `trace_linears`.

    Args:
        model: a Hugging Face model, or one with `combine=False`.
        run: calls `model` on some input.

    Returns:
        Groups of two or more, in the order of the calls.
    """
    groups: Groups = defaultdict(list)
    for readers in trace_linears(model, run).readers:
        if not readers.obstacle:
            groups[readers.owner].append(readers.names)
    return dict(groups)


def trace_linears(model: nn.Module, run: Callable[[], Any]) -> Trace:
    """Run `model` with hooks and see what its linears read.

    Linears that are called several times (a block that layers share, a loop) are together if they read the same
    tensors each time. Those of a container (`ModuleList`, `ModuleDict`, `Sequential`) belong to it.

    Args:
        model: a Hugging Face model, or one with `combine=False`.
        run: calls `model` on some input.
    """
    recorder = _Recorder(model)
    with torch.no_grad(), recorder:
        run()
    return recorder.trace()


class _Recorder:
    """Hooks that note what each linear is called with, and whether its module was running then."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = kept_dtypes(model, torch.bfloat16)
        self._linears = {
            (owner_name, name): child
            for owner_name, owner in model.named_modules()
            for name, child in owner.named_children()
            if isinstance(child, nn.Linear)
        }
        self._handles: list[Any] = []
        self._running: dict[nn.Module, int] = defaultdict(int)
        self._inputs: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)  # kept, so that no id is used twice
        self._outside: set[tuple[str, str]] = set()

    def __enter__(self) -> None:
        for name in dict.fromkeys(owner for owner, _ in self._linears):
            owner = self._model.get_submodule(name)
            self._handles.append(owner.register_forward_pre_hook(self._enter))
            self._handles.append(owner.register_forward_hook(self._leave, always_call=True))
        for key, linear in self._linears.items():
            hook = self._noting(self._model.get_submodule(key[0]), key)
            self._handles.append(linear.register_forward_pre_hook(hook))

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running[module] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running[module] -= 1

    def _noting(self, owner: nn.Module, key: tuple[str, str]) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._inputs[key].append(args[0])
            if not self._running[owner]:
                self._outside.add(key)

        return record

    def trace(self) -> Trace:
        together: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
        for (owner, name), inputs in self._inputs.items():
            together[owner, tuple(id(one) for one in inputs)].append(name)
        readers = [one for (owner, _), names in together.items() if len(names) > 1 for one in self._sort(owner, names)]
        uncalled: dict[str, tuple[str, ...]] = {}
        for owner, name in self._linears:
            if (owner, name) not in self._inputs:
                uncalled[owner] = (*uncalled.get(owner, ()), name)
        return Trace(tuple(readers), uncalled)

    def _sort(self, owner: str, names: list[str]) -> Iterator[Readers]:
        """Linears that read the same inputs, by whether they can be combined."""
        linears = {name: self._linears[owner, name] for name in names}
        plain = {name: linear for name, linear in linears.items() if type(linear) is nn.Linear}
        if len(plain) < len(linears):
            kinds = ", ".join(f"{name} is a {type(linears[name]).__name__}" for name in linears.keys() - plain.keys())
            yield Readers(owner, tuple(names), kinds)
        if len(plain) > 1:
            yield Readers(owner, tuple(plain), self._obstacle(owner, plain))

    def _obstacle(self, owner: str, linears: dict[str, nn.Linear]) -> str:
        if len({linear.bias is None for linear in linears.values()}) > 1:
            without = [name for name, linear in linears.items() if linear.bias is None]
            return f"mixed bias: {', '.join(without)} without"
        if len({(linear.weight.dtype, linear.weight.device) for linear in linears.values()}) > 1:
            return "mixed dtypes or devices"
        kept = {name for name in linears if self._kept(f"{owner}.{name}.weight" if owner else f"{name}.weight")}
        if kept and len(kept) < len(linears):
            return f"mixed dtypes: {', '.join(sorted(kept))} stays in fp32 where the others are bf16"
        if any((owner, name) in self._outside for name in linears):
            return "called while their module is not running"
        return ""
