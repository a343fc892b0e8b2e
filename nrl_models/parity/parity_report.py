"""The results of parity checks, as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.markup import escape

from nrl_models.common.value_checks import finite_or_none
from nrl_models.parity.result_table import ResultTable
from nrl_models.parity.worst import last_if_nan


class Outcome(StrEnum):
    """Outcome of a check. JSON reports have it under `verdict`."""

    PASS = "pass"
    FAIL = "fail"
    INCOMPLETE = "incomplete"
    """The check ended early, without a failure up to then."""

    @classmethod
    def of(cls, passed: bool) -> Outcome:
        """Return `PASS` or `FAIL`."""
        return cls.PASS if passed else cls.FAIL

    @property
    def shown(self) -> str:
        """The outcome as shown in tables, with failures in capitals."""
        return "FAIL" if self is Outcome.FAIL else self.value

    @property
    def markup(self) -> str:
        """`shown` in color, for rich."""
        style = {Outcome.PASS: "green", Outcome.FAIL: "bold red"}.get(self, "dim")
        return f"[{style}]{self.shown}[/{style}]"


def passed_line(passed: bool, count: int, total: int, checks: str) -> str:
    """Return the result of all checks in one line: `PASS: 24 of 24 checks passed`."""
    return f"{Outcome.of(passed).upper()}: {count} of {total} {checks} passed"


class Level(StrEnum):
    """Subject of a parity check."""

    WEIGHTS = "1"
    COMPONENTS = "2"
    LOGITS = "3"
    GRADIENTS = "gradients"


FIRST_DIVERGENCE = "first divergence"
"""Name of the check that locates the first modules with a different output."""


class Unit(StrEnum):
    """Unit of a measured value and its bound."""

    MAX_DIFF = "max_diff"
    """Largest absolute difference of two elements."""
    SHARE = "share"
    TIMES_TRANSFORMERS_ERROR = "times_transformers_error"
    """Error relative to fp32, divided by the error of transformers' model."""
    COUNT = "count"
    TOKEN_MULT_PROB_ERROR = "token_mult_prob_error"


@dataclass(frozen=True, slots=True)
class ParityRow:
    """Result of one check.

    Args:
        check: Name of the comparison.
        passed: Whether it passed.
        measured: The measured result.
        expected: The expected result.
        detail: Further information: the worst tensor, or the module that differs.
        level: Level of the check; None for checks outside the levels.
        value: Number to compare with `bound`; None if the check has none.
        bound: Largest `value` that passes; None if the check has none.
        unit: Unit of `value` and `bound`.
    """

    check: str
    passed: bool
    measured: str
    expected: str
    detail: str = ""
    level: Level | None = None
    value: float | None = None
    bound: float | None = None
    unit: Unit | None = None

    @property
    def share_of_bound(self) -> float | None:
        """`value` as a share of `bound`; None if the check has none, or must be exact."""
        if self.value is None or not self.bound:
            return None
        best = 1.0 if self.unit is Unit.TOKEN_MULT_PROB_ERROR else 0.0
        return (self.value - best) / (self.bound - best)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the check by name. NaN and infinity become None."""
        values: dict[str, Any] = finite_or_none(asdict(self))
        return values


@dataclass(slots=True)
class ParityReport:
    """Checks of one model against its reference.

    Args:
        title: Name of the model.
        rows: The checks, in order.
    """

    title: str
    rows: list[ParityRow] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.summary}>"

    @property
    def passed(self) -> bool:
        """Whether there was at least one check, and all passed."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failed(self) -> list[ParityRow]:
        """The checks that failed."""
        return [row for row in self.rows if not row.passed]

    @property
    def summary(self) -> str:
        """The result in one line: the number of checks that passed, and the one closest to its bound."""
        count = len(self.rows)
        line = f"{passed_line(self.passed, count - len(self.failed), count, 'checks')}: {self.title}"
        shares = {row.check: share for row in self.rows if (share := row.share_of_bound) is not None}
        if self.passed and any(shares.values()):
            worst = max(shares, key=lambda check: last_if_nan(shares[check]))
            line += f". Closest to its bound: {worst}, at {shares[worst]:.0%}"
        if divergences := [row.measured for row in self.failed if row.check == FIRST_DIVERGENCE]:
            line += f". First divergence: {divergences[0]}"
        return line

    def add(self, rows: Iterable[ParityRow]) -> None:
        """Append rows."""
        self.rows.extend(rows)

    def to_json(self) -> dict[str, Any]:
        """Return the report as `{"model", "verdict", "checks": [...]}`."""
        return {
            "model": self.title,
            "verdict": Outcome.of(self.passed),
            "checks": [row.to_json() for row in self.rows],
        }

    def failures(self) -> str:
        """Return two lines per failed check: the measured and the expected result."""
        lines = []
        for row in self.failed:
            lines.append(f"FAIL  {row.check}: {row.measured}" + (f" ({row.detail})" if row.detail else ""))
            lines.append(f"      expected: {row.expected}")
        return "\n".join(lines)

    def table(self) -> ResultTable:
        """Return the checks as a table."""
        table = ResultTable("check", "verdict", "measured", "expected", "detail", title=escape(self.title))
        for row in self.rows:
            # Measurements may contain brackets, which are not markup.
            cells = map(escape, (row.measured, row.expected, row.detail))
            table.add_row(escape(row.check), Outcome.of(row.passed).markup, *cells)
        return table
