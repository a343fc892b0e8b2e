"""The JSON file of a run: outcomes of cases, saved as they end, so that an interrupted run resumes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.reporting import Row

ROOT = Path(__file__).resolve().parents[2]


class CheckError(Exception):
    """A case whose figures exist, but whose check failed.

    Args:
        message: The measured and the expected result.
        rows: Figures to record.
    """

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass
class Outcome:
    """The outcome of one case.

    Args:
        rows: Figures; present for a failed check, and absent after an exception.
        error: Reason of the failure. Empty if the case passed.
        seconds: Duration.
    """

    rows: list[Row] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


@dataclass
class SectionOutcome:
    """The outcomes of a section.

    Args:
        sources: `digest` of the sources that ran.
        planned: Names of the cases, in order.
        cases: Outcomes by case.
        error: Reason why the section ended before it planned its cases.
    """

    sources: str
    planned: list[str] = field(default_factory=list)
    cases: dict[str, Outcome] = field(default_factory=dict)
    error: str = ""

    @property
    def is_finished(self) -> bool:
        """True if every planned case has an outcome, or the section failed as a whole."""
        return bool(self.error) or (bool(self.planned) and not self.missing)

    @property
    def missing(self) -> list[str]:
        """Planned cases without an outcome."""
        return [name for name in self.planned if name not in self.cases]

    @property
    def failures(self) -> list[str]:
        """One line per failure."""
        lines = [f"{name}: {outcome.error}" for name, outcome in self.cases.items() if outcome.error]
        return [self.error, *lines] if self.error else lines


class Results:
    """The results of one machine, in a file.

    Args:
        path: The file. It is read if it exists.
        machine: Description of the machine, or None to use the file's.
        size: `full` or `tiny`. A file of another size, GPU, torch or transformers is discarded.
    """

    IDENTITY = ("accelerator", "torch", "transformers")
    """Keys of `machine` that results must share to be in one file."""

    def __init__(self, path: Path, machine: Mapping[str, str] | None = None, size: str = "full") -> None:
        self.path, self.size = path, size
        self.machine = dict(machine or {})
        self.sections: dict[str, SectionOutcome] = {}
        self._lock = Lock()
        if not path.is_file():
            return
        content = json.loads(path.read_text())
        stored = content["machine"]
        if machine is not None and (size, *map(machine.get, self.IDENTITY)) != (
            content["size"],
            *map(stored.get, self.IDENTITY),
        ):
            return
        self.size, self.machine = content["size"], stored if machine is None else self.machine
        self.sections = {name: _section(values) for name, values in content["sections"].items()}

    def begin(self, section: str, sources: str) -> SectionOutcome:
        """Return the outcome of a section to add to: the stored one if the same sources did not finish it."""
        stored = self.sections.get(section)
        if stored is None or stored.is_finished or stored.sources != sources:
            self.sections[section] = SectionOutcome(sources)
            self.save()
        return self.sections[section]

    def plan(self, section: str, cases: Iterable[str]) -> None:
        """Record the names of a section's cases."""
        self.sections[section].planned = list(cases)
        self.save()

    def add(self, section: str, case: str, outcome: Outcome) -> None:
        """Record the outcome of a case."""
        with self._lock:
            self.sections[section].cases[case] = outcome
            self.save()

    def save(self) -> None:
        """Write the file in one step."""
        content = {
            "size": self.size,
            "machine": self.machine,
            "sections": {name: asdict(section) for name, section in self.sections.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(_finite(content), indent=1) + "\n")
        os.replace(temporary, self.path)


def _section(values: dict[str, Any]) -> SectionOutcome:
    cases = {name: Outcome(**outcome) for name, outcome in values["cases"].items()}
    return SectionOutcome(**(values | {"cases": cases}))


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def digest() -> str:
    """Return a digest of the sources that the figures depend on."""
    found = hashlib.sha256()
    for folder in ("nrl_models", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            found.update(str(file.relative_to(ROOT)).encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:12]
