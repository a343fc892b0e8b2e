"""Convert values of a recipe to the types of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

NOTHING = object()


def converted(member: Any, node: Any) -> Any:
    """A value as a type has it; `NOTHING` if it is of another."""
    if get_origin(member) is Literal:
        return node if node in get_args(member) else NOTHING
    if get_origin(member) is Mapping:
        return node if isinstance(node, Mapping) else NOTHING
    if isinstance(member, type) and issubclass(member, StrEnum):
        return member(node) if node in list(member) else NOTHING
    if member is float and type(node) is int:
        return float(node)
    return node if type(node) is member else NOTHING


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def shown_types(members: Sequence[Any]) -> str:
    """Types as a message names them."""
    shown: list[str] = []
    for member in members:
        if get_origin(member) is Literal:
            shown += [str(value) for value in get_args(member)]
        elif isinstance(member, type) and issubclass(member, StrEnum):
            shown += [str(value) for value in member]
        else:
            shown.append(_NAMES.get(member, "keys and values"))
    return " or ".join(shown)
