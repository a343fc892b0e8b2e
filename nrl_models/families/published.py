"""Sizes of published models, as families state them for the generated tests at full size."""

from typing import Any


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
