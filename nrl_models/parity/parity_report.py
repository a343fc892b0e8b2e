"""The results of parity checks, as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.markup import escape
from rich.table import Table


class Outcome(StrEnum):
    """The outcome of a check, as JSON reports have it under `verdict`."""

    PASS = "pass"
    FAIL = "fail"
    INCOMPLETE = "incomplete"
    """It ended early, and nothing had failed until then."""

    @classmethod
    def of(cls, passed: bool) -> Outcome:
        """`PASS` or `FAIL`."""
        return cls.PASS if passed else cls.FAIL

    @property
    def shown(self) -> str:
        """The outcome as tables show it: a failure in capitals."""
        return "FAIL" if self is Outcome.FAIL else self.value

    @property
    def markup(self) -> str:
        """`shown` in colour, for rich."""
        style = {Outcome.PASS: "green", Outcome.FAIL: "bold red"}.get(self, "dim")
        return f"[{style}]{self.shown}[/{style}]"


class Level(StrEnum):
    """What a parity check compares."""

    WEIGHTS = "1"
    COMPONENTS = "2"
    LOGITS = "3"
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One check.

    Args:
        check: what was compared.
        passed: whether it passed.
        measured: the result.
        expected: what the result had to be.
        detail: further help: the worst tensor, a module at fault.
        level: which comparison it belongs to; None for checks outside the levels.
    """

    check: str
    passed: bool
    measured: str
    expected: str
    detail: str = ""
    level: Level | None = None


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
            "verdict": Outcome.of(self.passed),
            "checks": [asdict(row) for row in self.rows],
        }

    def table(self) -> Table:
        """The report as a table."""
        table = Table(title=escape(self.title), title_justify="left")
        for column in ("check", "verdict", "measured", "expected", "detail"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            # Measurements may contain brackets, which are not markup.
            cells = map(escape, (row.measured, row.expected, row.detail))
            table.add_row(escape(row.check), Outcome.of(row.passed).markup, *cells)
        return table
