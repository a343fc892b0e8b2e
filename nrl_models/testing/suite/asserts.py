"""Assertions of the generated tests: closeness, equal outcomes, and detection of matmuls."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nrl_models.common.upstream_torch import TorchDispatchMode
from nrl_models.parity.compare import compare_state_dicts
from nrl_models.parity.components import Call
from nrl_models.testing.upstream_failures import TensorsDifferError

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_close(
    actual: Any, expected: Any, dtype: torch.dtype = torch.float32, scale: float = 1.0, message: str = ""
) -> None:
    """Assert equality within the dtype's tolerance, absolute and relative, times `scale`."""
    tolerance = TOLERANCE[dtype] * scale
    say = (lambda torch_message: f"{message}: {torch_message}") if message else None
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, msg=say)


def assert_same_outcome(actual: Callable[[], Any], expected: Callable[[], Any], scale: float = 1.0) -> None:
    """Assert that `actual` returns values close to those of `expected`, or raises the same error if that raises."""
    try:
        result = expected()
    except Exception as error:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            actual()
    else:
        assert_close(actual(), result, scale=scale)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in a directory."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that names, dtypes and values are bitwise equal."""
    comparison = compare_state_dicts(expected, actual, verbose=False)
    if not comparison.equal:
        raise TensorsDifferError(comparison)


class _OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


MATMULS = ("addmm", "baddbmm", "bmm", "linear", "mm")
"""Operators that linear layers call."""


def count_matmuls(layer: nn.Module, call: Call) -> int:
    """Count the matmuls of one forward of `layer` in training.

    Runs the layer itself, because groups that were separated may be fused again in a copy.
    """
    args, kwargs = copy.deepcopy((call.args, call.kwargs))
    with torch.enable_grad(), _OperatorCounter() as counter:
        layer(*args, **kwargs)
    return sum(counter.counts[name] for name in MATMULS)


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms inside a `with` block. Otherwise, GPUs change the order of sums over experts."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
