"""What a diagnostic says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Diagnosis:
    """The outcome of one diagnostic.

    Args:
        name: its command's.
        subject: the checkpoint.
        passed: the verdict.
        lines: what to print, in order.
        measured: the numbers, for JSON.
        informative: whether a failure is something to know and not something to mend.
    """

    name: str
    subject: str
    passed: bool = True
    lines: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    informative: bool = False

    def say(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)

    def finish(self, problem: str = "") -> Diagnosis:
        """End with the guide's last line: all good, or what is wrong."""
        self.passed = not problem
        self.say(f"[{self.subject}] ALL GOOD!" if self.passed else f"[{self.subject}] FAIL: {problem}")
        return self

    def to_json(self) -> dict[str, Any]:
        """`{"diagnostic", "verdict", "checkpoint", ...}`."""
        return {
            "diagnostic": self.name,
            "verdict": "pass" if self.passed else "fail",
            "informative": self.informative,
            "checkpoint": self.subject,
            **self.measured,
        }
