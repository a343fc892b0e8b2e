"""Functions that run in the worker processes of tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def run(subject: str) -> Iterator[str]:
    """Yield twice. After the first result, `crash` ends its process, `hang` sleeps, and `raise` raises."""
    yield f"{subject} 1"
    if subject == "crash":
        os._exit(3)
    if subject == "hang":
        time.sleep(60)
    if subject == "raise":
        raise ModuleNotFoundError("No module named 'missing'")
    yield f"{subject} 2"
