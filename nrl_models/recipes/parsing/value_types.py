"""Convert values of a recipe to the types of its fields."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from nrl_models.errors import shown

NOTHING = object()


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the types that a type hint allows: those of a union, or the hint itself. Recipes have no tensors."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(member for member in members if member is not torch.Tensor)


def converted(hint: Any, node: Any) -> Any:
    """Convert a value to the type of a hint. Return `NOTHING` if the value has another type."""
    values = (_converted(member, node) for member in members_of(hint))
    return next((value for value in values if value is not NOTHING), NOTHING)


def _converted(member: Any, node: Any) -> Any:
    if member is Any:
        return node
    if get_origin(member) is Literal:
        return node if node in get_args(member) else NOTHING
    if get_origin(member) is Mapping:
        return node if isinstance(node, Mapping) else NOTHING
    if get_origin(member) is tuple:
        kinds = get_args(member)
        values = (
            tuple(map(converted, kinds, node)) if isinstance(node, list) and len(node) == len(kinds) else (NOTHING,)
        )
        return NOTHING if NOTHING in values else values
    if isinstance(member, type) and issubclass(member, StrEnum):
        return member(node) if node in list(member) else NOTHING
    if member is float and type(node) is int:
        return float(node)
    return node if type(node) is member else NOTHING


def nested_keys(kind: type, above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a dataclass's fields, including nested dataclasses."""
    for name, hint in get_type_hints(kind).items():
        yield f"{above}{name}"
        parts = [member for member in members_of(hint) if isinstance(member, type) and is_dataclass(member)]
        if len(parts) == 1:
            yield from nested_keys(parts[0], f"{above}{name}.")


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def mismatch(hint: Any, node: Any) -> str:
    """Describe a value whose type does not match a hint: the value and the expected types."""
    return f"is {shown(node)}: expected {' or '.join(_type_names(hint))}"


def _type_names(hint: Any) -> Iterator[str]:
    for member in members_of(hint):
        if get_origin(member) is Literal:
            yield from map(str, get_args(member))
        elif get_origin(member) is tuple:
            yield f"a list of {len(get_args(member))} values"
        elif isinstance(member, type) and issubclass(member, StrEnum):
            yield from map(str, member)
        else:
            yield _NAMES.get(member, "keys and values")
