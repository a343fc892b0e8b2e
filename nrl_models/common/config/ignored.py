"""Configuration keys that a CLI command ignores, in addition to those of a call. Has no heavy imports."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

_ignored: frozenset[str] = frozenset()


def ignored_here() -> frozenset[str]:
    """Return the keys, by name or path, that are currently ignored in all threads."""
    return _ignored


@contextmanager
def ignoring(keys: Collection[str]) -> Iterator[None]:
    """Make `check_config` also ignore these keys while the context is open, in all threads."""
    global _ignored
    before = _ignored
    _ignored = before | frozenset(keys)
    try:
        yield
    finally:
        _ignored = before
