"""The table of docs/memory.md matches the output of `python -m benchmarks.scaling`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from benchmarks import scaling  # noqa: E402


def test_page_lists_models_in_table_order() -> None:
    table = scaling.PAGE.read_text().partition(scaling.BEGIN)[2].partition(scaling.END)[0]
    head, _, *rows = table.splitlines()
    assert head == scaling.HEAD
    assert [row.split(" | ")[:3] for row in rows] == [
        [f"| {case.model}", f"`{case.mesh}`", str(case.seq_len)] for case in scaling.CASES
    ]


@pytest.mark.parametrize("case", [scaling.CASES[0]], ids=lambda case: case.model)
def test_table_row_matches_current_estimate(case: scaling.Case) -> None:
    assert scaling.row(case) in scaling.PAGE.read_text().splitlines()
