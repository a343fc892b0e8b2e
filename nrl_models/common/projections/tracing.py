"""Tracing which linears read the same input, by running a model once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nrl_models.common.dtypes import kept_dtypes
from nrl_models.common.recording import modules_running


@dataclass(frozen=True)
class Readers:
    """Linears of one module that read the same tensors in the same order.

    A view of a tensor counts as another tensor, because a group recognizes its input by identity.

    Args:
        owner: Name of their module.
        names: Attribute names, in the order of the calls.
        obstacle: Reason why they cannot be fused; empty if they can.
    """

    owner: str
    names: tuple[str, ...]
    obstacle: str = ""


@dataclass(frozen=True)
class Trace:
    """Inputs of a model's linears in one run.

    Args:
        readers: Groups of at least two linears with the same inputs, in the order of their first calls.
        uncalled: Linears that were never called, by the name of their module.
    """

    readers: tuple[Readers, ...]
    uncalled: dict[str, tuple[str, ...]]

    @property
    def groups(self) -> dict[str, list[tuple[str, ...]]]:
        """For each module's name the groups of its linears that can be combined, in the order of the calls."""
        groups: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for readers in self.readers:
            if not readers.obstacle:
                groups[readers.owner].append(readers.names)
        return dict(groups)


def trace_linears(model: nn.Module, run: Callable[[], Any]) -> Trace:
    """Run `model` with hooks, and record the inputs of its linears.

    Linears that are called several times (in shared blocks or loops) belong together if they read the same tensors each
    time. The owner of a linear in a container (`ModuleList`, `ModuleDict`, `Sequential`) is the container.

    Args:
        model: A Hugging Face model, or one loaded with `combine=False`.
        run: Calls `model` on some input.
    """
    linears = {
        (owner_name, name): child
        for owner_name, owner in model.named_modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.Linear)
    }
    keys: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for key, linear in linears.items():
        keys[id(linear)].append(key)
    inputs: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)  # kept, so that no id is used twice
    outside: set[tuple[str, str]] = set()

    def note(_: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        for owner, name in keys.get(id(module), ()):
            inputs[owner, name].append(args[0])
            if owner not in running:
                outside.add((owner, name))

    with torch.no_grad(), modules_running(model, note) as running:
        run()

    together: dict[tuple[str, tuple[int, ...]], dict[str, nn.Linear]] = defaultdict(dict)
    for (owner, name), tensors in inputs.items():
        together[owner, tuple(map(id, tensors))][name] = linears[owner, name]
    kept_dtype = kept_dtypes(model, torch.bfloat16)
    readers = [
        reader
        for (owner, _), members in together.items()
        if len(members) > 1
        for reader in _readers(owner, members, {name for name in members if (owner, name) in outside}, kept_dtype)
    ]
    uncalled: dict[str, tuple[str, ...]] = {}
    for owner, name in linears:
        if (owner, name) not in inputs:
            uncalled[owner] = (*uncalled.get(owner, ()), name)
    return Trace(tuple(readers), uncalled)


def _readers(
    owner: str,
    linears: Mapping[str, nn.Linear],
    outside: Collection[str],
    kept_dtype: Callable[[str], torch.dtype | None],
) -> Iterator[Readers]:
    """Group linears with the same inputs, and check whether they can be fused.

    Args:
        owner: Name of their module.
        linears: Linears by attribute name.
        outside: Linears that are called while their module is not running.
        kept_dtype: See `kept_dtypes`.
    """
    plain = {name: linear for name, linear in linears.items() if type(linear) is nn.Linear}
    if len(plain) < len(linears):
        kinds = ", ".join(f"{name} is a {type(linears[name]).__name__}" for name in linears.keys() - plain.keys())
        yield Readers(owner, tuple(linears), kinds)
    if len(plain) < 2:
        return
    without_bias = [name for name, linear in plain.items() if linear.bias is None]
    in_fp32 = {name for name in plain if kept_dtype(f"{owner}.{name}.weight".removeprefix("."))}
    obstacle = ""
    if without_bias and len(without_bias) < len(plain):
        obstacle = f"mixed bias: {', '.join(without_bias)} without"
    elif len({(linear.weight.dtype, linear.weight.device) for linear in plain.values()}) > 1:
        obstacle = "mixed dtypes or devices"
    elif in_fp32 and len(in_fp32) < len(plain):
        obstacle = f"mixed dtypes: {', '.join(sorted(in_fp32))} stays in fp32 where the others are bf16"
    elif not plain.keys().isdisjoint(outside):
        obstacle = "called while their module is not running"
    yield Readers(owner, tuple(plain), obstacle)
