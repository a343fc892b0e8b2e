"""Select the worst of several measured errors. Python's `max` drops NaN, because no comparison with NaN is true."""

from __future__ import annotations

import math
from collections.abc import Iterable


def last_if_nan(value: float) -> float:
    """Return a key for `max`, `min` and `sorted` that orders NaN as infinite."""
    return math.inf if math.isnan(value) else value


def worst_of(errors: Iterable[float], default: float | None = None) -> float:
    """Return the largest error. NaN counts as infinite.

    Args:
        errors: Measured errors.
        default: Result without errors.

    Raises:
        ValueError: If there are neither errors nor a default.
    """
    errors = list(errors)
    return max(errors, key=last_if_nan) if errors or default is None else default
