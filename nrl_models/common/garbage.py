"""Making many small objects that stay, without garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """While open, Python's cyclic garbage collector is off; reference counting frees objects as usual.

    The collector visits all objects whenever their number has grown by a quarter, which is most of the time of making a
    table of tens of thousands of tensors. Use it around work that makes no cycles.
    """
    if not gc.isenabled():  # disabled elsewhere, or by a caller of this
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
