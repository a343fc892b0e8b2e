"""Length limits in a configuration, and whether a model has an encoder."""

from __future__ import annotations

from transformers import PreTrainedConfig


def model_limit(config: PreTrainedConfig) -> int | None:
    """Return a model's maximum number of tokens according to its configuration; None if it has no limit."""
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, key, None) for key in ("max_position_embeddings", "max_seq_len", "max_target_positions"))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def has_encoder(config: PreTrainedConfig) -> bool:
    """Return True if the model encodes one sequence and decodes another."""
    return config.is_encoder_decoder or config.get_text_config().is_encoder_decoder
