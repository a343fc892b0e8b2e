"""State that all threads share: the lock for building models, replaced functions, and the garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BUILDING = threading.RLock()
"""Held while transformers builds or loads a model.

transformers sets torch's default dtype and replaces functions of torch during that time. All threads share both, so two
simultaneous loads would restore each other's values. A fork waits for the lock, because the child would otherwise
inherit a lock that none of its threads releases, and torch in the state of that moment.
"""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=BUILDING.acquire, after_in_parent=BUILDING.release, after_in_child=BUILDING.release)


def in_forked_child(renew: Callable[[], object]) -> None:
    """Call a function in every forked child, to replace locks that threads of the parent held. No thread frees them."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


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


class _Replaced:
    """A function of a module or class that some threads replace.

    Args:
        owner, name: The module or class, and the name of the function.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.threads = owner, name, 0
        self.is_own, self.original = name in vars(owner), getattr(owner, name)
        self.of_thread = threading.local()

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.of_thread, "function", self.original)(*args, **kwargs)

        setattr(owner, name, call)

    def restore(self) -> None:
        """Put the original function back."""
        if self.is_own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


_replaced: dict[tuple[Any, str], _Replaced] = {}
_REPLACING = threading.RLock()


@contextmanager
def replaced_here(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Replace a function of a module or class in this thread only. Yields the function that it replaces.

    `mock.patch` replaces it for all threads, and two simultaneous patches restore each other's function.

    Args:
        owner: A module or class.
        name: Name of the function.
        function: The replacement. For a method, `self` is its first argument.
    """
    with _REPLACING:
        replaced = _replaced.get((owner, name)) or _Replaced(owner, name)
        _replaced[owner, name] = replaced
        replaced.threads += 1
    outer = vars(replaced.of_thread).copy()
    replaced.of_thread.function = function
    try:
        yield outer.get("function", replaced.original)
    finally:
        del replaced.of_thread.function
        vars(replaced.of_thread).update(outer)
        with _REPLACING:
            replaced.threads -= 1
            if not replaced.threads:
                del _replaced[owner, name]
                replaced.restore()
