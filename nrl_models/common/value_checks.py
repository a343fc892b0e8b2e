"""Checks of numbers and state dicts that callers pass, and numbers that JSON can hold."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from nrl_models.errors import UnknownArgumentError, shown

if TYPE_CHECKING:
    import torch


def is_number(value: Any, least: float = -sys.float_info.max, most: float = sys.float_info.max) -> bool:
    """Return True for a number in the bounds, both included. Booleans and NaN are not numbers."""
    number: Any = value  # mypy has no comparisons of `Real`
    return isinstance(value, Real) and not isinstance(value, bool) and least <= number <= most


def is_integer(value: Any, least: float = 0, most: float = math.inf) -> bool:
    """Return True for a whole number in the bounds, both included. Booleans are not numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def not_zero_or_one(mask: torch.Tensor) -> float | None:
    """Return the first value of a mask that is neither 0 nor 1, or None."""
    invalid = (mask != 0) & (mask != 1)
    return mask[invalid][0].item() if bool(invalid.any()) else None


def finite_or_none(value: Any) -> Any:
    """Return a value that JSON can hold: floats that are NaN or infinite become None, also inside dicts and lists."""
    if isinstance(value, Mapping):
        return {name: finite_or_none(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_names(state_dict: object) -> None:
    """Check that a state dict has names.

    Raises:
        UnknownArgumentError: If it is not a mapping, or a key is not a string.
    """
    expected = "expected a mapping of names to tensors"
    if not isinstance(state_dict, Mapping):
        raise UnknownArgumentError(f"state_dict is a {type(state_dict).__name__}: {expected}")
    if other := [key for key in state_dict if not isinstance(key, str)]:
        raise UnknownArgumentError(f"state_dict has the key {shown(other[0])}: {expected}")
