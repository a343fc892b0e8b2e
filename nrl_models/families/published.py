"""Helpers for the sizes of published models, which the generated tests use at full size."""

from typing import Any


def decoder_sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, key_values: int, **more: Any
) -> dict[str, Any]:
    """Return a decoder's sizes under the usual configuration keys, plus other values."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        **more,
    }
