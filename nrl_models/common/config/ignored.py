"""Configuration keys that a CLI command ignores, in addition to those of a call. Has no heavy imports."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from nrl_models.errors import UnknownArgumentError, shown

_ignored: frozenset[str] = frozenset()


def key_names(keys: Collection[str] | str) -> set[str]:
    """Return the keys of `ignore_config_keys`: one as a string, or a collection.

    Raises:
        UnknownArgumentError: If the argument is something else. An iterator would be empty when it is read again.
    """
    if isinstance(keys, str):
        return {keys}
    if isinstance(keys, Collection) and all(isinstance(key, str) for key in keys):
        return set(keys)
    raise UnknownArgumentError(
        f"ignore_config_keys={shown(keys)}: expected a key of config.json, or a list of keys, as strings"
    )


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
