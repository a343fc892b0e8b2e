"""The table of docs/memory.md matches the output of `python -m benchmarks.scaling`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from benchmarks import scaling  # noqa: E402


def test_every_model_of_the_table_is_on_the_page_in_its_order() -> None:
    table = scaling.PAGE.read_text().partition(scaling.BEGIN)[2].partition(scaling.END)[0]
    head, _, *rows = table.splitlines()
    assert head == scaling.HEAD
    assert [row.split(" | ")[:3] for row in rows] == [
        [f"| {case.model}", f"`{case.mesh}`", str(case.seq_len)] for case in scaling.CASES
    ]


@pytest.mark.parametrize("case", [scaling.CASES[0]], ids=lambda case: case.model)
def test_a_line_of_the_table_is_what_is_estimated_now(case: scaling.Case) -> None:
    assert scaling.row(case) in scaling.PAGE.read_text().splitlines()
