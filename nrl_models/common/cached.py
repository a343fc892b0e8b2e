"""`functools.cache` for functions of classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def cached(function: F) -> F:
    """Cache the results of `function` for each combination of arguments.

    Type checkers see the function's signature. They accept classes as arguments, although they consider them
    unhashable.
    """
    return cast(F, cache(function))
