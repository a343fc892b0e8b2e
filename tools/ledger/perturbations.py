"""Other values for configuration keys. The differential test changes one key at a time."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, Literal, get_args, get_origin

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from nrl_models.common.config.types import union_members
from nrl_models.testing import sizes

ACTIVATIONS = ("relu", "gelu", "silu")
Values = dict[str, Any]


def perturbed(config: PreTrainedConfig, path: str) -> Iterator[PreTrainedConfig | Exception]:
    """Yield configurations that differ from `config` in the key at `path`, as read from a `config.json` with that
    value.

    Lists with one entry per layer follow a changed number of layers. If the configuration class raises an error for a
    value, the error is yielded instead.
    """
    *parents, key = path.split(".")
    part = reduce(getattr, parents, config)
    everything = config.to_dict()
    own = part.to_dict()
    for value in other_values(type(part), key, own[key]):
        changes = {key: value, **_lists_that_follow(own, key, value)}
        values = everything
        for name, changed in changes.items():
            values = with_value_at(values, ".".join((*parents, name)), changed)
        try:
            yield type(config).from_dict(values)
        except Exception as error:  # configuration classes raise any exception
            yield error


def with_value_at(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of nested `values` with another value at `path`."""
    key, _, rest = path.partition(".")
    return {**values, key: with_value_at(values[key], rest, value) if rest else value}


def other_values(config_class: type[PreTrainedConfig], key: str, value: Any) -> list[Any]:
    """Return values to try in place of `value`, the likeliest valid ones first."""
    annotated = _annotation(config_class, key)
    found = [*_choices(annotated), *_by_type(key, value)]
    if value is None:
        found += _of_unset(key, annotated)
    return [other for other in found if type(other) is not type(value) or other != value]


def _by_type(key: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return list(ACTIVATIONS) if value in ACT2FN else [f"other-{value}"]
    if isinstance(value, int):
        return _whole_numbers(key, value)
    if isinstance(value, float):
        return _numbers(key, value)
    if isinstance(value, (list, tuple)):
        return _lists(key, list(value))
    if isinstance(value, dict):
        return _rope(value) if key.startswith("rope") else _dicts(key, value)
    return []


def _whole_numbers(key: str, value: int) -> list[int]:
    if sizes.is_token(key):
        return [value + 1 if value < sizes.FIRST_SPECIAL else value + 16]
    if key in sizes.LAYERS:
        return [value + 1, value - 1]
    if "vocab" in key:
        return [value + 64]
    if value <= 0:
        return [1, 2]
    return [other for other in (value // 2, value * 2, value + 1, value - 1, 0) if other >= 0]


def _numbers(key: str, value: float) -> list[float]:
    if "eps" in key:
        return [0.1]
    return [0.5, 0.1] if value == 0 else [value * 2, value / 2, value + 0.25]


def _lists(key: str, value: list[Any]) -> list[Any]:
    if not value:
        return [[0], [1]]
    found: list[Any] = [value[::-1], [value[0]] * len(value), [value[-1]] * len(value), value[:-1]]
    if all(type(item) is int for item in value):
        found += [[item + 1 for item in value], [max(1, item // 2) for item in value], [item * 2 for item in value]]
    elif all(isinstance(item, (int, float)) for item in value):
        found.append([item * 2 for item in value])
    return [other for other in found if other != value]


def _rope(value: Values) -> list[Values]:
    """Return rotary parameters with another base and twice the wavelengths, or with only one of these changes."""
    if nested := {key: inner for key, inner in value.items() if isinstance(inner, dict)}:
        changed = {key: _rope(inner) for key, inner in nested.items()}
        return [{**value, **{key: others[place] for key, others in changed.items()}} for place in range(3)]
    based = {**value, "rope_theta": 3 * (value.get("rope_theta") or 1e4)}
    kind = value.get("rope_type", "default")
    scaled = {"rope_type": "linear", "factor": 2.0} if kind == "default" else {"factor": 2.0 * value.get("factor", 1.0)}
    return [{**based, **scaled}, based, {**value, **scaled}]


def _dicts(key: str, value: Values) -> list[Any]:
    found: list[Any] = []
    for name, item in value.items():
        found += [{**value, name: other} for other in _by_type(str(name), item)[:1]]
    return [*found[:2], {}]


def _of_unset(key: str, annotated: Any) -> list[Any]:
    """Return values for an unset key: the value that tiny models need, or values that its annotation allows."""
    found = []
    if key in sizes.MISSING and not callable(sizes.MISSING[key]):
        found.append(sizes.MISSING[key])
    if sizes.is_token(key):
        found.append(3)
    by_type: dict[Any, list[Any]] = {bool: [True], int: [2, 8], float: [0.5, 30.0], str: ["gelu"], list: [[0, 1]]}
    for member in union_members(annotated):
        found += by_type.get(get_origin(member) or member, [])
    return found or [True, 2, 0.5]


def _lists_that_follow(own: Values, key: str, value: Any) -> Values:
    if key not in sizes.LAYERS or type(value) is not int:
        return {}
    lists = {name: items for name, items in own.items() if isinstance(items, list) and len(items) == own[key]}
    return {name: [*items, *items[-1:]][:value] for name, items in lists.items()}


def _choices(annotated: Any) -> list[Any]:
    literals = (member for member in union_members(annotated) if get_origin(member) is Literal)
    return [choice for literal in literals for choice in get_args(literal)]


def _annotation(config_class: type[PreTrainedConfig], key: str) -> Any:
    """Return a class's annotation of a key, with string annotations resolved. None if it is unknown."""
    annotated = next((field.type for field in dataclasses.fields(config_class) if field.name == key), None)
    if not isinstance(annotated, str):
        return annotated
    owner = next(base for base in config_class.__mro__ if key in vars(base).get("__annotations__", ()))
    try:
        return eval(annotated, vars(sys.modules[owner.__module__]))
    except (NameError, TypeError):  # a name that is imported only for type checkers
        return None
