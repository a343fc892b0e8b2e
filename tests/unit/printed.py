"""Compare the printed output of commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def unframed(text: str) -> str:
    """Return printed text on one line, without box frames, because line breaks depend on the terminal."""
    return " ".join(text.replace("│", " ").split())


def json_printed(code: str, *arguments: str) -> Any:
    """Run code in a new process, and return the JSON value that it prints last."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
