"""Record the result of each generated test in a JSON file."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest


class ResultsRecorder:
    """Records the result of every test with an architecture.

    The file has the form `{"versions": {...}, "results": [{"architecture", "check", "outcome", "reason"}]}`. A check is
    a test's name with its dtype. An outcome is `passed`, `failed`, `skipped` (a requirement is not installed) or
    `limited` (fails in the same way as transformers' class, as the family declares). With `--nrl-compare`, a failed
    result has `"upstream": true` if transformers' class fails in the same way without a declaration.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.results: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase's outcome; a failure in any phase wins."""
        architecture = dict(report.user_properties).get("architecture")
        if architecture is None or (report.when != "call" and report.outcome == "passed"):
            return
        name = report.nodeid.partition("::")[2].partition("@")[0]
        check = name.replace(f"[{architecture}]", "").replace(f"{architecture}-", "")
        limit = getattr(report, "wasxfail", "").removeprefix("reason: ")
        skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else None
        self.results[name] = {
            "architecture": architecture,
            "check": check,
            "outcome": "limited" if limit and report.outcome == "skipped" else report.outcome,
            "reason": limit or skipped or _crash(report),
        }
        if report.outcome == "failed" and dict(report.user_properties).get("upstream"):
            self.results[name]["upstream"] = True

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        versions = {package: version(package) for package in ("nrl_models", "torch", "transformers")}
        content = {"versions": versions, "results": [self.results[name] for name in sorted(self.results)]}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(content, indent=1) + "\n")


def _crash(report: pytest.TestReport) -> str:
    """Return the reason of a test's failure in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.strip().splitlines()[0] if crash is not None and crash.message.strip() else ""
