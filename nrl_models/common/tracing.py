"""Which linears read the same input: a fact about a model, found by running it once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Groups = dict[str, list[tuple[str, ...]]]
"""For each module's name the groups of its own linears, by attribute name, that read one input."""


def trace_groups(model: nn.Module, run: Callable[[], Any]) -> Groups:
    """Run `model` with hooks and group the plain linears of each module that receive the very same tensor.

    Args:
        model: an uncombined model.
        run: calls `model` on some input.

    Returns:
        Groups of two or more, in the order of the calls. Linears called several times count by their
        first call.
    """
    calls: list[tuple[str, str, torch.Tensor]] = []  # keeps the inputs, so that no identity is used twice
    handles = []
    for owner_name, owner in model.named_modules():
        for name, child in owner.named_children():
            if type(child) is nn.Linear:
                handles.append(child.register_forward_pre_hook(_recorder(calls, owner_name, name)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    readers: dict[tuple[str, int], list[str]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for owner_name, name, tensor in calls:
        if (owner_name, name) not in seen:
            seen.add((owner_name, name))
            readers[owner_name, id(tensor)].append(name)
    groups: Groups = defaultdict(list)
    for (owner_name, _), names in readers.items():
        if len(names) > 1:
            groups[owner_name].append(tuple(names))
    return dict(groups)


def _recorder(calls: list[tuple[str, str, torch.Tensor]], owner: str, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append((owner, name, args[0]))

    return hook
