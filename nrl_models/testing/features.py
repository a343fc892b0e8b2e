"""What the generated tests prove of a model, by name: the columns of the coverage page, and what a family may limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

FEATURES = (
    "state dict",
    "layers",
    "logits",
    "gradients",
    "activation checkpointing",
    "left padding",
    "right padding",
    "packed sequences",
    "batch order",
    "router replay",
    "cached decoding",
    "generate",
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
def generated_tests() -> Mapping[str, str]:
    """For each generated test, by name, the feature it proves."""
    found = {}
    for file in sorted(SUITE.glob("test_*.py")):
        module = import_module(f"nrl_models.testing.suite.{file.stem}")
        found |= {name: test.feature for name, test in vars(module).items() if hasattr(test, "feature")}
    return found
