"""Writes the sample of the demo into the README: `python -m tests.readme_samples`, which runs the demo."""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nrl_models.cli.demo import next_commands, run_demo
from nrl_models.parity.parity_report import Outcome

README = Path(__file__).parents[1] / "README.md"
BEFORE = (
    "$ make demo     # trains a small Llama with transformers on real text, loads it here, checks everything about it\n"
)
AFTER = "$ make test "
"""What stands before and after the sample."""

SHOWN = (
    "trained with transformers",
    "loaded through the registry",
    "level 1: weights",
    "level 2: LlamaAttention",
    "level 2: LlamaAttention, bfloat16",
    "level 3: logits, bfloat16",
    "generated text",
    "saved, and loaded by transformers",
)
"""The checks of the sample."""


def sample(checks: Sequence[Mapping[str, Any]]) -> str:
    """The rows of the demo that the README shows, and its last lines; `checks` are those of its JSON."""
    table = Table()
    for column in ("check", "verdict", "measured", "expected"):
        table.add_column(column, no_wrap=True)
    for check in checks:
        if check["check"] in SHOWN:
            values = check["check"], Outcome.of(check["passed"]).shown, check["measured"], check["expected"]
            table.add_row(*values)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    rows = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([*rows[:-1], "…", "Try next:", *(f"  {command}" for command in next_commands("demo"))]) + "\n"


def shown(page: str) -> str:
    """The sample that the README has."""
    return page.partition(BEFORE)[2].partition(AFTER)[0]


def fixed(text: str) -> list[tuple[str, ...]]:
    """What a sample says on every machine: checks, verdicts and limits, without numbers; and the last lines."""
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if not line.startswith(("┏", "┡"))]
    return [
        (row[1], row[2], re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", row[4])) if len(row) > 4 else tuple(row) for row in rows
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = json.loads(json.dumps(run_demo(folder).to_json()))
    text = README.read_text()
    README.write_text(text.replace(shown(text), sample(report["checks"])))
