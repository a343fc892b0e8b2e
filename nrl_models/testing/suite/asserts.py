"""What the generated tests mean by close and by the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_close(
    actual: Any, expected: Any, dtype: torch.dtype = torch.float32, scale: float = 1.0, message: str = ""
) -> None:
    """Equal to the dtype's tolerance, absolute and relative, times `scale`; `message` says what, where it is not."""
    tolerance = TOLERANCE[dtype] * scale
    say = (lambda found: f"{message}: {found}") if message else None
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, msg=say)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of every safetensors file in `folder`."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and values, bit for bit."""
    assert set(actual) == set(expected), f"names differ: {sorted(set(actual) ^ set(expected))[:8]}"
    different = [
        name
        for name, tensor in expected.items()
        if actual[name].dtype != tensor.dtype or not torch.equal(actual[name], tensor)
    ]
    assert not different, f"{len(different)} tensors differ: {different[:8]}"
