"""A crash or a timeout of one subject loses neither its earlier results nor other subjects."""

from __future__ import annotations

import pytest
from worker_subjects import run

from tools.release_check.workers import End, Ending, Result, run_subjects


@pytest.mark.long
def test_crash_and_timeout_affect_one_subject_each() -> None:
    events = list(run_subjects(run, ["a", "crash", "hang", "raise", "b"], jobs=1, timeout=10))
    values = {event.value for event in events if isinstance(event, Result)}
    assert values == {"a 1", "a 2", "crash 1", "hang 1", "raise 1", "b 1", "b 2"}
    ends = {event.subject: event for event in events if isinstance(event, End)}
    assert {name: end.ending for name, end in ends.items()} == {
        "a": Ending.FINISHED,
        "crash": Ending.CRASHED,
        "hang": Ending.TIMED_OUT,
        "raise": Ending.CRASHED,
        "b": Ending.FINISHED,
    }
    assert ends["crash"].detail == "exit code 3"
    assert ends["raise"].detail == "ModuleNotFoundError: No module named 'missing'"


def test_empty_subjects_start_no_worker() -> None:
    assert list(run_subjects(run, [], jobs=2, timeout=1)) == []
