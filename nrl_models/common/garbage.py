"""Making a hundred thousand small objects that stay, without looking for garbage among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Nobody looks for cycles of garbage meanwhile; what is freed by its last reference is freed as ever.

    Python looks through all objects whenever their number has grown by a quarter, which takes most of the time of
    making a table of tens of thousands of tensors. Use it around work that makes no cycles.
    """
    if not gc.isenabled():  # by somebody else, or by a caller of this
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
