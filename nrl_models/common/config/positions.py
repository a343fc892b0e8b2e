"""How long a sequence may be."""

from __future__ import annotations

from transformers import PreTrainedConfig


def model_limit(config: PreTrainedConfig) -> int | None:
    """Tokens of a sequence that a model takes, by its configuration; None if that does not say."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, key, None) for key in ("max_position_embeddings", "max_seq_len", "max_target_positions"))
    return min((limit for limit in found if isinstance(limit, int) and limit > 0), default=None)
