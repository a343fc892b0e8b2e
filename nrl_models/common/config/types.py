"""Values of a configuration in the types its class declares: an integer where a float stands is meant as one.

transformers checks types strictly, and `router_aux_loss_coef: 0`, as YAML and JSON write it, is refused. Other types
are refused here too, but with the file and all the keys at once.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nrl_models.common.logs import get_logger
from nrl_models.common.switches import is_off

logger = get_logger(__name__)


def with_declared_types(config_class: type[PreTrainedConfig], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`values`, in which integers are floats where `config_class` takes no integer; it is said which.

    Args:
        config_class: what the values are for; those of configurations nested in it are looked at, too.
        values: by key, as in `config.json`.
        source: where they are from, for the message.
    """
    if is_off("strict-config-types"):
        return dict(values)
    result, changed = _converted(config_class, values)
    if changed:
        logger.warning(
            f"{source} has integers where {config_class.__name__} takes floats; they are read as such: "
            + ", ".join(f"{key}: {value}" for key, value in changed.items())
        )
    return result


def _converted(
    config_class: type[PreTrainedConfig], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    result, changed = dict(values), {}
    nested = getattr(config_class, "sub_configs", None) or {}
    for key, value in values.items():
        if type(value) is int and takes_floats_only(config_class, key):
            result[key] = float(value)
            changed[key] = value
        elif isinstance(value, Mapping) and key in nested:
            inner_class = (
                CONFIG_MAPPING[value["model_type"]] if value.get("model_type") in CONFIG_MAPPING else nested[key]
            )
            if isinstance(inner_class, type) and issubclass(inner_class, PreTrainedConfig):
                result[key], inner = _converted(inner_class, value)
                changed |= {f"{key}.{name}": value for name, value in inner.items()}
    return result, changed


def takes_floats_only(config_class: type[PreTrainedConfig], key: str) -> bool:
    """Whether a configuration class declares that `key` is a float and cannot be an integer."""
    declared = getattr(config_class, "__dataclass_fields__", {}).get(key)
    members = union_members(declared.type) if declared is not None else ()
    return float in members and int not in members


def is_same_value(value: Any, other: Any) -> bool:
    """Whether two values are equal and of one type: `1` is neither `True` nor `1.0`."""
    return type(value) is type(other) and value == other


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation allows: the members of a union, else itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
