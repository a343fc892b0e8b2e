"""Counting the matrix products a layer runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nrl_models.parity.components import Call, run_layer


class _OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


MATMULS = ("addmm", "baddbmm", "bmm", "linear", "mm")
"""The operators linear layers come down to."""


def count_matmuls(layer: nn.Module, call: Call) -> int:
    """How many matrix products one forward of `layer` runs."""
    with _OperatorCounter() as counter:
        run_layer(layer, call)
    return sum(counter.counts[name] for name in MATMULS)
