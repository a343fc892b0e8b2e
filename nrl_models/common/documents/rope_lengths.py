"""Lengths at which a model's rotary embeddings change."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig


class RopeLimit(NamedTuple):
    """A length above which rotary embeddings depend on the longest sequence of a batch.

    Attributes:
        tokens: The length.
        is_switch: Whether all longer sequences have the same embeddings (LongRoPE). Otherwise they differ by length
            (dynamic NTK).
    """

    tokens: int
    is_switch: bool


def length_of_new_rope(config: PreTrainedConfig) -> RopeLimit | None:
    """Return the length above which rotary embeddings change with a sequence's length; None if they never do."""
    if (switch := rope_switch(config)) is not None:
        return RopeLimit(switch, is_switch=True)
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    is_dynamic = any(kind.get("rope_type") == "dynamic" for kind in _rope_settings(text))
    return RopeLimit(limit, is_switch=False) if is_dynamic and isinstance(limit, int) else None


def rope_switch(config: PreTrainedConfig) -> int | None:
    """Return the length above which LongRoPE uses its long factors (`original_max_position_embeddings`), or None.

    transformers selects the factors by the length of each sequence, vLLM by its `max_model_len`.
    """
    text = config.get_text_config(decoder=True)
    kinds = _rope_settings(text)
    if not any(kind.get("rope_type") == "longrope" for kind in kinds):
        return None
    limits = [kind.get("original_max_position_embeddings") for kind in kinds]
    limits.append(getattr(text, "original_max_position_embeddings", None))
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _rope_settings(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the settings of all layers, and those of each layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
