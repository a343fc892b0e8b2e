"""The result of a diagnostic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nrl_models.common.value_checks import finite_or_none
from nrl_models.parity.parity_report import Outcome, Unit


@dataclass(slots=True)
class Diagnosis:
    """Result of one diagnostic.

    Args:
        name: Name of its command.
        subject: The checkpoint.
        outcome: Whether it passed.
        lines: Lines to print.
        measured: Measurements for JSON.
        informative: Whether a failure is only informative, and not an error.
        value: The measured number; None if the diagnostic has none.
        bound: The largest `value` that passes.
        unit: Unit of both.
    """

    name: str
    subject: str
    outcome: Outcome = Outcome.PASS
    lines: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    informative: bool = False
    value: float | None = None
    bound: float | None = None
    unit: Unit | None = None

    @property
    def passed(self) -> bool:
        """Whether the diagnostic passed."""
        return self.outcome == Outcome.PASS

    def say(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)

    def finish(self, problem: str = "") -> Diagnosis:
        """Set the outcome, and end with the line `PASS: NAME: SUBJECT`, or `FAIL: NAME: SUBJECT: PROBLEM`."""
        self.outcome = Outcome.of(not problem)
        self.say(": ".join([self.outcome.upper(), self.name, self.subject, *([problem] if problem else [])]))
        return self

    def to_json(self) -> dict[str, Any]:
        """Return `{"diagnostic", "verdict", "value", "bound", "unit", "checkpoint", ...}`."""
        return {
            "diagnostic": self.name,
            "verdict": self.outcome,
            "informative": self.informative,
            "value": finite_or_none(self.value),
            "bound": self.bound,
            "unit": self.unit,
            "checkpoint": self.subject,
            **self.measured,
        }
