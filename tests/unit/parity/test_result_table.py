"""Tables of results on wide and narrow consoles."""

from __future__ import annotations

import io

from rich.console import Console

from nrl_models.parity.parity_report import Outcome, ParityReport, ParityRow
from nrl_models.parity.result_table import ResultTable


def printed(table: ResultTable, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_narrow_console_prints_rows_as_blocks() -> None:
    table = ResultTable("check", "verdict", "measured", "expected", "detail", title="a \\[model]")
    table.add_row("level 1", Outcome.PASS.markup, "39 tensors", "equal", "")
    table.add_row("level 2", Outcome.FAIL.markup, "max_diff 1.0e+00", "at most 1.0e-05", "model.layers.0.self_attn")
    assert printed(table, 60) == [
        "a [model]",
        "level 1: pass",
        "  measured  39 tensors",
        "  expected  equal",
        "level 2: FAIL",
        "  measured  max_diff 1.0e+00",
        "  expected  at most 1.0e-05",
        "  detail    model.layers.0.self_attn",
    ]
    wide = printed(table, 100)
    assert printed(table, 100) == wide
    assert "│ level 2 │ FAIL    │" in "\n".join(wide)


def test_no_word_is_truncated_at_any_width() -> None:
    words = ["model.layers.10.self_attn.q_proj.weight", "1.0000001", "token_mult_prob_error"]
    report = ParityReport("model")
    report.add([ParityRow("level 1: a check with many short words in its name", True, *words)])
    for width in range(60, 160):
        text = "\n".join(printed(report.table(), width))
        assert all(word in text for word in (*words, "pass", "verdict" if "│" in text else "pass")), width
