"""State that all threads of a process share: the lock for building models, and the garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BUILDING = threading.RLock()
"""Held while transformers builds or loads a model.

transformers sets torch's default dtype and replaces functions of torch during that time. All threads share both, so two
simultaneous loads would restore each other's values. A fork waits for the lock, because the child would otherwise
inherit a lock that none of its threads releases, and torch in the state of that moment.
"""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=BUILDING.acquire, after_in_parent=BUILDING.release, after_in_child=BUILDING.release)


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable Python's cyclic garbage collector. Reference counting still frees objects.

    The collector visits all objects whenever their number has grown by a quarter. This dominates the time to create
    tables of tens of thousands of tensors. Use it around code that creates no reference cycles. No effect in a
    background thread, because all threads share the collector.
    """
    is_background = threading.current_thread() is not threading.main_thread()
    if is_background or not gc.isenabled():  # disabled elsewhere, or by an outer call
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
