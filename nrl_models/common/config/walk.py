"""Reading configurations whole, every key in every part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def own_values(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys and values that `config` would save, parts (nested configurations) as they are.

    Where layers have values of their own (`per_layer_config`), transformers refuses to read the one that the others
    have; here it is read.
    """
    read = getattr(config, "_getattr_without_heterogeneous_validation", None) or (lambda *a: getattr(config, *a))
    return {key: value if key == "per_layer_config" else read(key, value) for key, value in config.to_dict().items()}


def walk(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, PreTrainedConfig, str, Any]]:
    """Every key: its path (`text_config.hidden_size`), the part it stands in, its name there, and its value."""
    for key, value in own_values(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from walk(value, f"{prefix}{key}.")
        else:
            yield prefix + key, config, key, value


def all_values(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """The keys and values of `config` and of its parts, theirs in place of them."""
    return ((key, value) for _, _, key, value in walk(config))


def parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configurations nested in `config`, by key."""
    return {key: value for key, value in own_values(config).items() if isinstance(value, PreTrainedConfig)}
