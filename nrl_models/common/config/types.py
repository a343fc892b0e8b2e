"""Convert values of a configuration to the types that its class declares: integers become floats where needed.

transformers checks types strictly and raises for `router_aux_loss_coef: 0`, although YAML and JSON write 0.0 that way.
Other wrong types also raise here, in one error that has the file and all keys.
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
    """Return `values` with integers converted to floats if `config_class` requires floats. Logs the conversions.

    Args:
        config_class: Configuration class of the values. Values of nested configurations are also converted.
        values: Values by key, as in `config.json`.
        source: Origin of the values, for the message.
    """
    if is_off("strict-config-types"):
        return dict(values)
    result, changed = _converted(config_class, values)
    if changed:
        logger.warning(
            f"{source} has integers where {config_class.__name__} requires floats; they are converted: "
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
    """Return True if a configuration class declares that `key` is a float and cannot be an integer."""
    declared = getattr(config_class, "__dataclass_fields__", {}).get(key)
    members = union_members(declared.type) if declared is not None else ()
    return float in members and int not in members


def is_same_value(value: Any, other: Any) -> bool:
    """Return True if two values are equal and of the same type: `1` differs from `True` and `1.0`."""
    return type(value) is type(other) and value == other


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows: the members of a union, else itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
