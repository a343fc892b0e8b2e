"""A pytest plugin that records each test's outcome immediately, with the function that failed.

    python -m pytest -p tools.release_check.pytest_outcomes --outcomes FILE.jsonl [--finished FILE]

Tests in the `--finished` file are skipped, so that an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tools.release_check.failing_function import failing_function
from tools.release_check.outcome_files import OutcomeFile


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("release check")
    group.addoption("--outcomes", type=Path, required=True, help="JSON lines file to which outcomes are appended")
    group.addoption("--finished", type=Path, help="file with the names of tests to leave out, one in a line")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that collects reports. Workers of pytest-xdist send theirs to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--outcomes")), "release-check-outcomes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that an earlier run finished."""
    file: Path | None = config.getoption("--finished")
    if file is not None:
        finished = set(file.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in finished])
        items[:] = [item for item in items if item.nodeid not in finished]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Store the exception in the report, as values that pytest-xdist can send."""
    report = yield
    if call.excinfo is not None and report.failed:
        error = call.excinfo.value
        report.failure = {  # type: ignore[attr-defined]
            "error_type": type(error).__name__,
            "function": failing_function(error),
            "message": " ".join(str(error).split())[:500],
            "quirk": _quirk(error),
        }
    return report


class Recorder:
    """Appends an outcome for every test: `{"test", "outcome", "architecture", "failure"}`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = OutcomeFile(path, ("test",))
        self._failed: set[str] = set()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failure in any phase, or otherwise the outcome of the test itself."""
        if not (report.when == "call" or report.failed or report.skipped):
            return
        if report.nodeid in self._failed:
            return
        outcome: dict[str, Any] = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "architecture": dict(report.user_properties).get("architecture", ""),
        }
        if report.failed:
            self._failed.add(report.nodeid)
            lost = {"error_type": "", "function": "", "message": str(report.longrepr)[:500], "quirk": ""}
            outcome["failure"] = getattr(report, "failure", lost)
        self._file.add(outcome)


def _quirk(error: BaseException) -> str:
    """Return the quirk whose tripwire raised an error. Empty for other errors."""
    traceback = error.__traceback__
    name = ""
    while traceback is not None:
        quirk = traceback.tb_frame.f_locals.get("quirk")
        name = str(getattr(quirk, "name", name)) if quirk is not None else name
        traceback = traceback.tb_next
    return name
