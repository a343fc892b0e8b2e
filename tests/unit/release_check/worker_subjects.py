"""Functions that run in the worker processes of tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def run(subject: str) -> Iterator[str]:
    """Yield twice; `crash` ends its process, and `hang` sleeps, after the first."""
    yield f"{subject} 1"
    if subject == "crash":
        os._exit(3)
    if subject == "hang":
        time.sleep(60)
    yield f"{subject} 2"
