"""Differences of two tensors, or of two state dicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch


class TensorComparison(NamedTuple):
    """Difference of a tensor from its reference.

    Attributes:
        max_diff: Largest absolute difference; infinite if only one tensor has a NaN at some position.
        mean_diff: Mean absolute difference.
        cosine_similarity: Cosine of the flattened tensors, in fp64; 1.0 if both are zero.
    """

    max_diff: float
    mean_diff: float
    cosine_similarity: float

    def __str__(self) -> str:
        return f"max_diff={self.max_diff:.6e}, mean_diff={self.mean_diff:.6e}, cosine_sim={self.cosine_similarity:.8f}"


def compare_tensors(
    reference: torch.Tensor, actual: torch.Tensor, name: str = "", *, verbose: bool = True
) -> TensorComparison:
    """Compare two tensors of equal shape, and print a line. Differences are in fp32, the cosine in fp64.

    Args:
        reference: The reference tensor.
        actual: The tensor under test, on any device, in any dtype.
        name: Prefix of the line.
        verbose: Whether to print: `logits: max_diff=1.907349e-06, mean_diff=2.384186e-07, cosine_sim=1.00000000`.

    Raises:
        ValueError: If the shapes differ.
    """
    result = _difference(reference, actual)
    if verbose:
        print(f"{name}: {result}" if name else result)
    return result


def _difference(reference: torch.Tensor, actual: torch.Tensor) -> TensorComparison:
    if reference.shape != actual.shape:
        raise ValueError(f"shapes differ: reference {tuple(reference.shape)}, actual {tuple(actual.shape)}")
    if reference.numel() == 0:
        return TensorComparison(0.0, 0.0, 1.0)
    first = reference.detach().float().flatten()
    second = actual.detach().to(first.device).float().flatten()
    # Infinities (masked logits) and NaNs at the same position in both tensors are equal.
    same = (first == second) | (first.isnan() & second.isnan())
    difference = torch.where(same, 0.0, (first - second).abs())
    max_diff = difference.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    mean_diff = difference.mean().item() if math.isfinite(max_diff) else math.inf
    finite = first.isfinite() & second.isfinite()
    vectors = first[finite].double(), second[finite].double()
    cosine = 1.0 if torch.equal(*vectors) else torch.cosine_similarity(*vectors, dim=0).item()
    return TensorComparison(max_diff, mean_diff, cosine)


class StateDictComparison(NamedTuple):
    """Differences of two state dicts.

    Attributes:
        missing: Names that only the reference has.
        extra: Names that only the tested state dict has.
        max_diffs: Largest absolute difference of each shared tensor that differs; infinite if shape or dtype differ.
    """

    missing: set[str]
    extra: set[str]
    max_diffs: dict[str, float]

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        return not (self.missing or self.extra or self.max_diffs)

    def __str__(self) -> str:
        if self.equal:
            return "all tensors match exactly"
        differences = [f"missing {name}" for name in sorted(self.missing)]
        differences += [f"extra {name}" for name in sorted(self.extra)]
        differences += [f"{name}: max_diff={diff:.6e}" for name, diff in sorted(self.max_diffs.items())]
        return "; ".join(differences)


def compare_state_dicts(
    reference: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    prefix: str = "",
    *,
    verbose: bool = True,
) -> StateDictComparison:
    """Compare two state dicts exactly, key by key, and print the differences.

    Args:
        reference: The reference state dict.
        actual: The state dict under test.
        prefix: Prefix of each line.
        verbose: Whether to print.
    """
    max_diffs = {}
    for name in sorted(reference.keys() & actual.keys()):
        first, second = reference[name], actual[name]
        if first.shape != second.shape or first.dtype != second.dtype:
            max_diffs[name] = math.inf
        elif not torch.equal(first, second.to(first.device)):
            max_diffs[name] = _difference(first, second).max_diff
    result = StateDictComparison(reference.keys() - actual.keys(), actual.keys() - reference.keys(), max_diffs)
    if verbose:
        for line in _lines(result, len(reference)):
            print(f"{prefix}{line}")
    return result


def _lines(comparison: StateDictComparison, parameters: int) -> Iterator[str]:
    """Yield the lines of the parity guide for a comparison."""
    if comparison.missing:
        yield f"Missing keys: {sorted(comparison.missing)}"
    if comparison.extra:
        yield f"Extra keys: {sorted(comparison.extra)}"
    for name, difference in comparison.max_diffs.items():
        yield f"{name}: max_diff={difference:.6e}" + (
            " (shapes or dtypes differ, or NaN)" if math.isinf(difference) else ""
        )
    if comparison.equal:
        yield f"All {parameters} parameters match exactly."
