"""Checks of numbers that callers pass."""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real
from typing import Any


def is_number(value: Any, least: float = -sys.float_info.max, most: float = sys.float_info.max) -> bool:
    """Return True for a number in the bounds, both included. Booleans and NaN are not numbers."""
    number: Any = value  # mypy has no comparisons of `Real`
    return isinstance(value, Real) and not isinstance(value, bool) and least <= number <= most


def is_integer(value: Any, least: float = 0, most: float = math.inf) -> bool:
    """Return True for a whole number in the bounds, both included. Booleans are not numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most
