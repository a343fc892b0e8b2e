"""The outcome of an edit as nested data, to compare two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path
from typing import Any

import torch

Outcome = Any  # None, bool, int, float, str, Path, dtype, type, tensor, and mappings, sequences and sets of these.

TOLERANCE = 2e-5


def differences(actual: Outcome, expected: Outcome, tolerance: float = TOLERANCE, at: str = "") -> Iterator[str]:
    """List the differences between two outcomes, one per line. Empty if they are equal.

    Tensors are equal if shape, dtype and `requires_grad` agree, and values agree within `tolerance`, relative to the
    largest.

    Raises:
        TypeError: An outcome contains a value that cannot be compared.
    """
    at = at or "outcome"
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        yield from _of_tensors(actual, expected, tolerance, at)
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if missing := [name for name in expected if name not in actual]:
            yield f"{at}: lacks {missing}"
        if surplus := [name for name in actual if name not in expected]:
            yield f"{at}: also has {surplus}"
        for name, value in expected.items():
            if name in actual:
                yield from differences(actual[name], value, tolerance, f"{at}[{name!r}]")
        if list(actual) != list(expected) and set(actual) == set(expected):
            yield f"{at}: in another order: {list(actual)}, expected {list(expected)}"
    elif _is_sequence(expected) and _is_sequence(actual):
        if len(actual) != len(expected):
            yield f"{at}: {len(actual)} entries, expected {len(expected)}: {_short(actual)}, {_short(expected)}"
        for index, (mine, other) in enumerate(zip(actual, expected, strict=False)):
            yield from differences(mine, other, tolerance, f"{at}[{index}]")
    elif isinstance(expected, float) and isinstance(actual, float):
        if not abs(actual - expected) <= tolerance * max(1.0, abs(expected)):
            yield f"{at}: {actual!r}, expected {expected!r}"
    else:
        _comparable(expected, at)
        _comparable(actual, at)
        if type(actual) is not type(expected) or actual != expected:
            yield f"{at}: {_short(actual)}, expected {_short(expected)}"


def _of_tensors(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, at: str) -> Iterator[str]:
    for name in ("shape", "dtype", "requires_grad", "is_meta"):
        if (mine := getattr(actual, name)) != (other := getattr(expected, name)):
            yield f"{at}: {name} is {mine}, expected {other}"
            return
    if expected.is_meta or expected.numel() == 0:
        return
    mine, other = (tensor.detach().to(torch.float64) for tensor in (actual, expected))
    gap = (mine - other).abs().max().item()
    # Written so that NaN counts as a difference.
    if not gap <= tolerance * max(1.0, other.abs().max().item()):
        yield f"{at}: differs by {gap:.3g} where values reach {other.abs().max().item():.3g}"


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _comparable(value: Any, at: str) -> None:
    plain = (bool, int, float, str, bytes, type, torch.dtype, torch.device, torch.Size, Enum, Path, Set)
    if value is None or isinstance(value, (*plain, torch.Tensor, Mapping)) or _is_sequence(value):
        return
    if dataclasses.is_dataclass(value):
        return
    raise TypeError(f"{at} is a {type(value).__name__}: an outcome holds tensors and plain data")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
