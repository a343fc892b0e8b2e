"""Failures of generated tests that transformers' class causes."""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nrl_models.testing.features import SUITE

if TYPE_CHECKING:
    from nrl_models.parity.compare import StateDictComparison
    from nrl_models.testing.case import FamilyCase


class TensorsDifferError(AssertionError):
    """Two state dicts are not equal.

    Attributes:
        comparison: Their differences.
    """

    def __init__(self, comparison: StateDictComparison) -> None:
        self.comparison = comparison
        super().__init__(str(comparison))


def failure(test: Callable[..., None], arguments: Mapping[str, Any]) -> Exception | None:
    """Run a test, and return its error; None if it passes."""
    try:
        test(**arguments)
    except Exception as error:
        return error
    return None


def failure_of_reference(test: Callable[..., None], arguments: Mapping[str, Any]) -> Exception | None:
    """Run a test on transformers' class, in a separate directory if it writes files."""
    others = {**arguments, "family_case": arguments["family_case"].of_reference()}
    if "tmp_path" in others:
        others["tmp_path"] = others["tmp_path"] / "upstream"
        others["tmp_path"].mkdir()
    return failure(test, others)


def described(error: Exception | None) -> str:
    """Return an error's type and message. For a comparison only the type, because two models have other numbers."""
    if error is None:
        return "passes"
    name = type(error).__name__
    return name if isinstance(error, AssertionError) else f"{name}: {error}"


def places(error: BaseException | None) -> list[tuple[str, int]]:
    """Return the lines of the suite that an error passed: several assertions of a test have one type."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return [(frame.filename, frame.lineno or 0) for frame in frames if Path(frame.filename).parent == SUITE]


def is_of_reading_back(error: Exception, case: FamilyCase) -> bool:
    """Return True if an error lists only tensors that transformers' class changes when it loads what it saved."""
    if not isinstance(error, TensorsDifferError):
        return False
    comparison = error.comparison
    if comparison.missing or comparison.extra or not all(map(math.isfinite, comparison.max_diffs.values())):
        return False
    return comparison.max_diffs.keys() <= tensors_not_read_back(case)


def tensors_not_read_back(case: FamilyCase) -> frozenset[str]:
    """Return the tensors that transformers' class changes when it loads what it saved; none if it cannot.

    Such a class sets values after loading, without a check of whether they were loaded.
    """
    import torch

    from nrl_models.parity.compare import compare_state_dicts

    try:
        saved = case.reference(torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            saved.save_pretrained(folder)
            loaded = case.reference_class.from_pretrained(folder, dtype=torch.float32).state_dict()
    except Exception:  # any error of transformers' class; the test's own error is reported
        return frozenset()
    return frozenset(compare_state_dicts(saved.state_dict(), loaded, verbose=False).max_diffs)
