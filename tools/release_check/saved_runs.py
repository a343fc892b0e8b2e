"""Run every part of every subject in worker processes, and save outcomes immediately, so that a run resumes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tools.release_check.outcome_files import OutcomeFile
from tools.release_check.workers import End, Ending, Result, Run, run_subjects


class SavedOutcome(Protocol):
    """The outcome of one part of an architecture."""

    @property
    def architecture(self) -> str:
        """The subject."""

    @property
    def part(self) -> StrEnum:
        """The part of it."""

    def to_json(self) -> dict[str, Any]:
        """The fields, for a line of JSON."""


T = TypeVar("T", bound=SavedOutcome)

KILLED = tuple(f"exit code {-number}" for number in (signal.SIGKILL, signal.SIGTERM))
"""Messages of outcomes whose process was killed, for example because the machine ran out of memory."""


def was_interrupted(ending: str | None, message: str | None) -> bool:
    """Return True if a time limit or a signal ended the run of an outcome's subject. Then the outcome is unknown.

    Args:
        ending: The outcome, or the type of the error that ended it.
        message: The error.
    """
    return ending == Ending.TIMED_OUT or (ending == Ending.CRASHED and message in KILLED)


@dataclass(frozen=True)
class SavedRun(Generic[T]):
    """Runs subjects in workers, and saves their outcomes.

    Args:
        run: Yields an outcome for every part of a subject, in a worker process.
        parts: The parts of every subject.
        part_field: The field name of the part in a line of JSON.
        from_json: Reads an outcome.
        lost: Creates the outcome of a part that is missing because the process crashed or timed out.
    """

    run: Run
    parts: Sequence[StrEnum]
    part_field: str
    from_json: Callable[[dict[str, Any]], T]
    lost: Callable[[str, StrEnum, End], T]

    def outcomes(
        self, path: Path, names: Sequence[str], versions: Mapping[str, str], *, jobs: int, timeout: float
    ) -> Iterator[T]:
        """Yield the outcomes of every subject: existing ones of the file, then new ones, which are appended.

        Subjects that were interrupted run again.

        Args:
            path: The file of outcomes.
            names: Subjects.
            versions: Versions of the packages that influence the outcomes. Saved outcomes of other versions are
                ignored.
            jobs: Number of worker processes.
            timeout: Timeout of one subject in seconds.
        """
        file = OutcomeFile(path, ("architecture", self.part_field))
        done: dict[str, list[T]] = {}
        for values in file:
            if values.get("versions") != versions or values["architecture"] not in names:
                continue
            if not was_interrupted(values.get("outcome") or values.get("error_type"), values.get("message")):
                done.setdefault(values["architecture"], []).append(self.from_json(values))
        finished = {name for name, found in done.items() if {one.part for one in found} == set(self.parts)}
        for name in sorted(finished):
            yield from done[name]
        left = {name: list(self.parts) for name in names if name not in finished}

        def keep(outcome: T) -> T:
            left[outcome.architecture].remove(outcome.part)
            values = outcome.to_json() | {"versions": dict(versions)}
            file.add(values)
            return self.from_json(values)

        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers
        for event in run_subjects(self.run, list(left), jobs=jobs, timeout=timeout):
            if isinstance(event, Result):
                yield keep(event.value)
            elif event.ending is not Ending.FINISHED:
                for part in list(left[event.subject]):
                    yield keep(self.lost(event.subject, part, event))
