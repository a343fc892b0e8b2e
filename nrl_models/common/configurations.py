"""Reading configurations whole, every key in every part; and writing sizes down."""

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


def all_values(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """The keys and values of `config` and of its parts, theirs in place of them."""
    for key, value in own_values(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from all_values(value)
        else:
            yield key, value


def parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configurations nested in `config`, by key."""
    return {key: value for key, value in own_values(config).items() if isinstance(value, PreTrainedConfig)}


def decoder_sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, key_values: int, **more: Any
) -> dict[str, Any]:
    """A decoder's sizes under the keys that most configurations have for them, and whatever else is given."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        **more,
    }
