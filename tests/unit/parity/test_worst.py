"""NaN is the worst error, at any position."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from nrl_models.parity.parity_report import Level
from nrl_models.parity.precision import ComparedTensors, Errors
from nrl_models.parity.worst import worst_of


@pytest.mark.parametrize("errors", list(permutations([0.1, math.nan, 0.3])))
def test_nan_is_worst(errors: tuple[float, ...]) -> None:
    assert math.isnan(worst_of(errors))


def test_largest_error_or_default() -> None:
    assert worst_of(iter([0.1, 0.3, 0.2])) == 0.3
    assert worst_of([0.1, math.inf]) == math.inf
    assert worst_of([], default=1.0) == 1.0
    with pytest.raises(ValueError, match="empty"):
        worst_of([])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_layers_with_undefined_error_fail(order: tuple[int, int]) -> None:
    infinite = Errors(math.inf, math.inf)
    times = [Errors(1.0, 1.0), infinite.times(infinite)]  # infinite in the reference as well: the multiple is NaN
    errors = ComparedTensors()
    for index in order:
        errors.add(f"layer {index}", times[index])
    row = errors.row("level 2", Level.COMPONENTS)
    assert not row.passed
    assert row.detail == "worst: layer 1"
