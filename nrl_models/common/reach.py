"""Which parameters the loss does not depend on: they receive no gradient, and an optimiser keeps no state for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def unreachable_parameters(model: nn.Module, run: Callable[[], torch.Tensor]) -> dict[str, str]:
    """The parameters that can receive no gradient from a loss, each with the reason.

    The loss's graph is walked, nothing is computed backwards and no gradient is touched. What is found holds for the
    inputs: a vision tower is not reached by text alone.

    Args:
        model: the model, in the mode and with the settings it is trained in.
        run: computes the loss, a scalar or any tensor with a graph, on some input.

    Returns:
        By name, in the model's order.

    Raises:
        ValueError: what `run` returns has no graph.
    """
    called: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    handles = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules()]
    try:
        with torch.enable_grad():
            loss = run()
    finally:
        for handle in handles:
            handle.remove()
    if loss.grad_fn is None:
        raise ValueError("the loss has no graph: every parameter is frozen, or `run` computes it under torch.no_grad()")
    reached = _leaves(loss)
    result = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            result[name] = "is frozen (requires_grad=False)"
        elif id(parameter) not in reached:
            owner = name.rpartition(".")[0]
            result[name] = "is computed with, but the loss does not depend on it" if owner in called else _UNCALLED
    return result


_UNCALLED = "belongs to a module that is never called"


def _leaves(loss: torch.Tensor) -> set[int]:
    """Identities of the leaves of `loss`'s graph."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return found
