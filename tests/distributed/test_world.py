"""Worlds of processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.long
def test_ranks_exit_after_parent_is_killed() -> None:
    script = Path(__file__).parent / "jobs" / "killed_parent.py"
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
    deadline = time.monotonic() + 30
    while is_running(rank):
        assert time.monotonic() < deadline, "the rank is still running"
        time.sleep(0.5)


def is_running(process: int) -> bool:
    """Return True unless the process ended. A container may not remove ended processes."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
