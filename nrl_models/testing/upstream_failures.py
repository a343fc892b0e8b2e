"""Failures of generated tests that transformers' class causes."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nrl_models.testing.features import SUITE

if TYPE_CHECKING:
    from nrl_models.testing.case import FamilyCase

_TENSOR = re.compile(r"([\w.]+): max_diff=[\d.e+-]+")
"""A tensor in the message of `assert_same_tensors` with other values. Of another shape or dtype, it says `inf`."""


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


def tensors_not_read_back(case: FamilyCase) -> frozenset[str]:
    """Return the tensors that transformers' class changes when it loads what it saved.

    Such a class sets values after loading, without a check of whether they were loaded.
    """
    import torch

    saved = case.reference(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        loaded = case.reference_class.from_pretrained(folder, dtype=torch.float32).state_dict()
    return frozenset(name for name, tensor in saved.state_dict().items() if not torch.equal(tensor, loaded[name]))


def differs_only_in(error: Exception, tensors: Collection[str]) -> bool:
    """Return True if an error of `assert_same_tensors` lists only values of these tensors."""
    lines = str(error).splitlines() if isinstance(error, AssertionError) else []
    found = [_TENSOR.fullmatch(part) for part in lines[0].split("; ")] if lines else []
    return bool(found) and all(match is not None and match[1] in tensors for match in found)
