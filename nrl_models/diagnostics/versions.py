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
class Versions:
    """Results in all environments, in the order of the arguments.

    Args:
        diagnoses: Interpreter or directory of each environment, and the diagnosis: `INCOMPLETE` if the engine failed.
    """

    diagnoses: tuple[tuple[Path, Diagnosis], ...]

    @property
    def verdict(self) -> Outcome:
        """`FAIL` if a diagnosis failed, `INCOMPLETE` if an engine failed."""
        outcomes = {diagnosis.outcome for _, diagnosis in self.diagnoses}
        return next(outcome for outcome in (Outcome.FAIL, Outcome.INCOMPLETE, Outcome.PASS) if outcome in outcomes)

    @property
    def passed(self) -> bool:
        """Whether every version passed."""
        return self.verdict == Outcome.PASS

    @property
    def summary(self) -> str:
        """The result in one line: the number of environments that passed."""
        passed = sum(diagnosis.passed for _, diagnosis in self.diagnoses)
        return f"{self.verdict.upper()}: {passed} of {len(self.diagnoses)} environments passed"

    def table(self) -> ResultTable:
        """Return a table with a row for each environment."""
        table = ResultTable("environment", "engine", "verdict", "result")
        for environment, diagnosis in self.diagnoses:
            engine = escape(str(diagnosis.measured.get("engine", ""))) or "-"
            line = diagnosis.lines[0 if diagnosis.outcome is Outcome.INCOMPLETE else -1]
            table.add_row(escape(str(environment)), engine, diagnosis.outcome.markup, escape(line))
        return table

    def to_json(self) -> dict[str, Any]:
        """Return `{"verdict", "environments": [{"environment", "verdict", "error", ...}]}`."""
        return {
            "verdict": self.verdict,
            "environments": [
                {"environment": str(environment), "verdict": diagnosis.outcome}
                | (
                    {"error": "\n".join(diagnosis.lines)}
                    if diagnosis.outcome is Outcome.INCOMPLETE
                    else {"error": None, **diagnosis.to_json()}
                )
                for environment, diagnosis in self.diagnoses
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
    diagnoses = []
    for environment in environments:
        show(f"== {environment}")
        try:
            diagnosis = diagnose(environment)
        except EngineError as error:
            diagnosis = Diagnosis("", "", Outcome.INCOMPLETE, str(error).splitlines())
        for line in diagnosis.lines:
            show(line)
        diagnoses.append((environment, diagnosis))
    return Versions(tuple(diagnoses))
