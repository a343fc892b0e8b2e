"""Making many small objects that stay, without garbage collections."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Context manager that disables Python's cyclic garbage collector. Reference counting still frees objects.

    The collector visits all objects whenever their number has grown by a quarter. This dominates the time to create
    tables of tens of thousands of tensors. Use it around code that creates no reference cycles. No effect in a
    background thread, because the collector belongs to the whole process.
    """
    is_background = threading.current_thread() is not threading.main_thread()
    if is_background or not gc.isenabled():  # disabled elsewhere, or by a caller of this
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
