"""Old public names that still work, with a `DeprecationWarning`; see docs/deprecation.md."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, new_names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that serves old names.

    Args:
        module: The module's `__name__`.
        new_names: Old name to new name, both in the module.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{module}.{new_names[name]}")
        return getattr(sys.modules[module], new_names[name])

    return __getattr__


def with_new_keywords(keywords: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """Return keyword arguments with old names replaced by new ones."""
    for name in keywords.keys() & new_names.keys():
        _warn(f"{name}=", f"{new_names[name]}=")
    return {new_names.get(name, name): value for name, value in keywords.items()}


class OldAttribute:
    """A class attribute that serves an attribute of its instances under an old name.

    Args:
        new_name: The attribute's present name.
    """

    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self.names = f"{owner.__name__}.{name}", f"{owner.__name__}.{self.new_name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        _warn(*self.names)
        return getattr(instance, self.new_name)

    def __set__(self, instance: Any, value: Any) -> None:
        _warn(*self.names)
        setattr(instance, self.new_name, value)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} was renamed to {new}; the old name goes with 0.3", DeprecationWarning, stacklevel=3)
