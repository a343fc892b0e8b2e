"""What the generated tests prove of a model, by name: the columns of the coverage page, and what a family may limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

INVARIANCES = (
    "activation checkpointing",
    "left padding",
    "right padding",
    "packed sequences",
    "batch order",
    "router replay",
    "cached decoding",
    "generate",
)
"""Features that transformers' own class may lack: where it fails the same tests, the family says so in `limits`.

Whatever compares with transformers' class (weights, layers, logits, gradients, files, LoRA) has no such excuse.
"""

FEATURES = (
    "state dict",
    "layers",
    "logits",
    "gradients",
    *INVARIANCES,
    "LoRA",
    "tied weights",
    "copies",
    "files",
    "refit",
)
"""In the order in which they are shown."""

SUITE = Path(__file__).with_name("suite")
"""The folder of the generated tests."""

Test = TypeVar("Test", bound=Callable[..., Any])


def proves(feature: str) -> Callable[[Test], Test]:
    """Mark a generated test as one of those behind `feature`.

    A family that lacks the feature says so (`FamilyModel.limits`), and its tests then have to fail: where they pass,
    the limit is gone.

    Args:
        feature: one of `FEATURES`.
    """
    if feature not in FEATURES:
        raise ValueError(f"unknown feature {feature!r}: expected one of {', '.join(FEATURES)}")

    def mark(test: Test) -> Test:
        test.feature = feature  # type: ignore[attr-defined]
        return test

    return mark


@cache
def suite() -> Mapping[str, Callable[..., Any]]:
    """The generated tests by name, in the order of the files."""
    modules = [import_module(f"nrl_models.testing.suite.{file.stem}") for file in sorted(SUITE.glob("test_*.py"))]
    return {name: test for module in modules for name, test in vars(module).items() if hasattr(test, "feature")}


def generated_tests() -> Mapping[str, str]:
    """For each generated test, by name, the feature it proves."""
    return {name: test.feature for name, test in suite().items()}  # type: ignore[attr-defined]
