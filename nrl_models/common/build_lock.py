"""The lock that is held while transformers builds or loads a model."""

from __future__ import annotations

import os
import threading

__all__ = ["BUILDING"]

BUILDING = threading.RLock()
"""Held while transformers builds or loads a model.

transformers sets torch's default dtype and replaces functions of torch during that time. All threads share both, so two
simultaneous loads would restore each other's values. A fork waits for the lock, because the child would otherwise
inherit a lock that no thread of its own releases, and torch in the state of that moment.
"""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=BUILDING.acquire, after_in_parent=BUILDING.release, after_in_child=BUILDING.release)
