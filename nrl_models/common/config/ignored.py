"""Configuration keys that a whole command is to ignore, beside those that a call names. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

_ignored: frozenset[str] = frozenset()


def ignored_here() -> frozenset[str]:
    """The keys, by name or path, that are ignored now, in whatever thread."""
    return _ignored


@contextmanager
def ignoring(keys: Collection[str]) -> Iterator[None]:
    """While open, `check_config` ignores these keys, too."""
    global _ignored
    before = _ignored
    _ignored = before | frozenset(keys)
    try:
        yield
    finally:
        _ignored = before
