"""Section `tests`: the generated tests on the device, one pytest process per architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.outcomes import ROOT, CheckError
from benchmarks.gpu.sections import PATTERNS
from benchmarks.reporting import Row
from nrl_models import registry
from nrl_models.testing.features import SUITE

WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Processes at once. They share the GPU: tiny models use little of it."""

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""Outcome of a test by the element that JUnit's XML has for it. An expected failure is also `skipped` there."""


def cases(context: Context) -> dict[str, Case]:
    """Return a case per architecture."""
    registry.architectures()
    families = PATTERNS[:1] if context.tiny else PATTERNS
    architectures = [registry.FAMILIES[family][0] for family in families]
    return {architecture: partial(_run, architecture) for architecture in architectures}


def _run(architecture: str) -> list[Row]:
    plugins = ["nrl_models.testing.plugin"] + ["pytest_timeout"] * (find_spec("pytest_timeout") is not None)
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
        command += [f"-p{name}" for name in plugins]
        command += [
            str(SUITE),
            f"--nrl-family={architecture}",
            f"--junitxml={report}",
            f"--basetemp={folder}/temporary",
        ]
        environment = os.environ | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # this package may be installed, and register its plugin again
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // WORKERS)),
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not report.is_file():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {last_line(done.stderr or done.stdout)}")
        sys.stderr.write(done.stdout)  # into the log
        found = outcomes(report)
    counts = {kind: list(found.values()).count(kind) for kind in ("passed", "failed", "skipped")}
    failed = [name for name, outcome in found.items() if outcome == "failed"]
    rows: list[Row] = [{"architecture": architecture, "tests": len(found), **counts}]
    if failed or not counts["passed"]:
        raise CheckError(f"{len(failed)} of {len(found)} tests failed: {', '.join(failed[:6])}", rows)
    return rows


def outcomes(report: Path) -> dict[str, str]:
    """Return `passed`, `failed` or `skipped` by test, from a JUnit report."""
    return {
        case.attrib["name"]: next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")
        for case in ElementTree.parse(report).iter("testcase")
    }


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
