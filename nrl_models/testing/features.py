"""Features that the generated tests verify: columns of the coverage page, and keys of a family's `limits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from nrl_models.testing.case import FamilyCase

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
"""Features that transformers' class may lack. If it fails the same tests, the family declares them in `limits`.

Tests that compare with transformers' class (weights, layers, logits, gradients, files, LoRA) cannot be limited.
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
"""All features, in the order in which they are shown."""

SUITE = Path(__file__).with_name("suite")
"""Directory of the generated tests."""

Test = TypeVar("Test", bound=Callable[..., Any])
Condition = Callable[["FamilyCase"], bool]
"""Returns True if a test applies to a class, according to its declarations, without building a model."""


def proves(feature: str) -> Callable[[Test], Test]:
    """Mark a generated test as a test of `feature`.

    If a family lacks the feature (`FamilyModel.limits`), the test also runs on transformers' class, and both have to
    fail in the same way.

    Args:
        feature: One of `FEATURES`.
    """
    if feature not in FEATURES:
        raise ValueError(f"unknown feature {feature!r}: expected one of {', '.join(FEATURES)}")

    def mark(test: Test) -> Test:
        test.feature = feature  # type: ignore[attr-defined]
        return test

    return mark


def applies_to(*conditions: Condition) -> Callable[[Test], Test]:
    """Collect a test only for classes that meet all of `conditions` (`nrl_models.testing.suite.conditions`)."""

    def mark(test: Test) -> Test:
        test.conditions = conditions  # type: ignore[attr-defined]
        return test

    return mark


def conditions_of(test: Callable[..., Any]) -> tuple[Condition, ...]:
    """Return the conditions under which `test` applies to a class."""
    return getattr(test, "conditions", ())


def applies(test: Callable[..., Any], case: FamilyCase) -> bool:
    """Return True if `test` applies to the class of `case`."""
    return all(condition(case) for condition in conditions_of(test))


@cache
def suite() -> Mapping[str, Callable[..., Any]]:
    """Return the generated tests by name, in the order of their files."""
    modules = [import_module(f"nrl_models.testing.suite.{file.stem}") for file in sorted(SUITE.glob("test_*.py"))]
    return {name: test for module in modules for name, test in vars(module).items() if hasattr(test, "feature")}


def generated_tests() -> Mapping[str, str]:
    """Return the feature that each generated test verifies, by the name of the test."""
    return {name: test.feature for name, test in suite().items()}  # type: ignore[attr-defined]
