"""What parity checks found: rows with a verdict each, as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

VERDICTS = {True: "[green]pass[/green]", False: "[bold red]FAIL[/bold red]"}
"""What tables show for whether a check passed."""


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One check.

    Args:
        check: what was compared.
        passed: the verdict.
        measured: what came out.
        expected: what it had to be.
        detail: what else helps: the worst tensor, a culprit.
    """

    check: str
    passed: bool
    measured: str
    expected: str
    detail: str = ""


@dataclass(slots=True)
class ParityReport:
    """Checks of one model against its reference.

    Args:
        title: which model.
        rows: the checks, in order.
    """

    title: str
    rows: list[ParityRow] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there were any."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def add(self, rows: Iterable[ParityRow]) -> None:
        """Append rows."""
        self.rows.extend(rows)

    def to_json(self) -> dict[str, Any]:
        """`{"model", "verdict", "checks": [...]}`."""
        return {
            "model": self.title,
            "verdict": "pass" if self.passed else "fail",
            "checks": [asdict(row) for row in self.rows],
        }

    def table(self) -> Table:
        """The report as a table."""
        table = Table(title=escape(self.title), title_justify="left")
        for column in ("check", "verdict", "measured", "expected", "detail"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            # What was measured may have brackets in it, which are no markup here.
            cells = map(escape, (row.measured, row.expected, row.detail))
            table.add_row(escape(row.check), VERDICTS[row.passed], *cells)
        return table
