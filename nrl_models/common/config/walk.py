"""Walk through all keys of a configuration and its nested configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from nrl_models.common.upstream import config_value


def own_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys and values that `config` would save, with nested configurations as objects.

    If layers have separate values (`per_layer_config`), transformers raises when the common value is read. This
    function reads it anyway.
    """
    return {
        key: value if key == "per_layer_config" else config_value(config, key, value)
        for key, value in config.to_dict().items()
    }


def walk(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, PreTrainedConfig, str, Any]]:
    """Yield all keys: path (`text_config.hidden_size`), configuration that contains it, name there, and value."""
    for key, value in own_values(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from walk(value, f"{prefix}{key}.")
        else:
            yield prefix + key, config, key, value


def all_values(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of `config`, with nested configurations replaced by their keys and values."""
    return ((key, value) for _, _, key, value in walk(config))


def parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Return the configurations nested in `config`, by key."""
    return {key: value for key, value in own_values(config).items() if isinstance(value, PreTrainedConfig)}


def values_of_layers(config: PreTrainedConfig, key: str) -> tuple[Any, ...]:
    """Return the distinct values of a key across a model's layers, or its single value; empty if it has none."""
    layers = getattr(config, "per_layer_config", None) if getattr(config, "is_heterogeneous", False) else None
    if not layers:
        return (getattr(config, key),) if hasattr(config, key) else ()
    values = (getattr(layer, key, None) for layer in layers)
    return tuple(dict.fromkeys(value for value in values if value is not None))
