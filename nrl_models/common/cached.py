"""`functools.cache` for functions of classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def cached(function: F) -> F:
    """Remember what `function` returned for each of its arguments.

    Type checkers keep the function's own signature, and take classes, which they do not think hashable, as arguments.
    """
    return cast(F, cache(function))
