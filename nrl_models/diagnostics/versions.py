"""Run one diagnostic with several versions of an engine, each in a separate environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from nrl_models.diagnostics.result import Diagnosis
from nrl_models.errors import EngineError
from nrl_models.parity.parity_report import Outcome
from nrl_models.parity.result_table import ResultTable


@dataclass(frozen=True, slots=True)
class Version:
    """Result in one environment.

    Args:
        environment: Interpreter or directory of the environment.
        diagnosis: The result; None if the engine failed.
        error: Error of the engine.
    """

    environment: Path
    diagnosis: Diagnosis | None = None
    error: str = ""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the diagnosis. `INCOMPLETE` if the engine failed."""
        return Outcome.INCOMPLETE if self.diagnosis is None else self.diagnosis.outcome

    @property
    def engine(self) -> str:
        """Version of the engine; empty if unknown."""
        return "" if self.diagnosis is None else str(self.diagnosis.measured.get("engine", ""))


@dataclass(frozen=True, slots=True)
class Versions:
    """Results in all environments, in the order of the arguments."""

    found: tuple[Version, ...]

    @property
    def verdict(self) -> Outcome:
        """`FAIL` if a diagnosis failed, `INCOMPLETE` if an engine failed."""
        outcomes = {version.outcome for version in self.found}
        return next(outcome for outcome in (Outcome.FAIL, Outcome.INCOMPLETE, Outcome.PASS) if outcome in outcomes)

    @property
    def passed(self) -> bool:
        """Whether every version passed."""
        return self.verdict == Outcome.PASS

    @property
    def summary(self) -> str:
        """The result in one line: the number of environments that passed."""
        passed = sum(version.outcome is Outcome.PASS for version in self.found)
        return f"{self.verdict.upper()}: {passed} of {len(self.found)} environments passed"

    def table(self) -> ResultTable:
        """Return a table with a row for each environment."""
        table = ResultTable("environment", "engine", "verdict", "result")
        for version in self.found:
            last = version.error.splitlines()[0] if version.diagnosis is None else version.diagnosis.lines[-1]
            table.add_row(
                escape(str(version.environment)), escape(version.engine) or "-", version.outcome.markup, escape(last)
            )
        return table

    def to_json(self) -> dict[str, Any]:
        """Return `{"verdict", "environments": [{"environment", "verdict", "error", ...}]}`."""
        return {
            "verdict": self.verdict,
            "environments": [
                {"environment": str(version.environment), "verdict": version.outcome, "error": version.error or None}
                | ({} if version.diagnosis is None else version.diagnosis.to_json())
                for version in self.found
            ],
        }


def diagnose_versions(
    environments: Sequence[Path], diagnose: Callable[[Path], Diagnosis], show: Callable[[str], None]
) -> Versions:
    """Run a diagnostic in each environment. If the engine fails in one of them, the others still run.

    Args:
        environments: Interpreters, or directories of virtual environments.
        diagnose: Runs the diagnostic in one environment.
        show: Prints a line.
    """
    found = []
    for environment in environments:
        show(f"== {environment}")
        try:
            version = Version(environment, diagnose(environment))
        except EngineError as error:
            version = Version(environment, error=str(error))
        for line in [version.error] if version.diagnosis is None else version.diagnosis.lines:
            show(line)
        found.append(version)
    return Versions(tuple(found))
