"""Tiny configurations: about a million parameters, yet large enough that a mistake shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.06,  # about 1 / sqrt(hidden_size): activations keep their size, so errors do not drown
    "sliding_window": 8,  # shorter than the test sequences
    # special tokens
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # mixtures of experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    # vision
    "image_size": 56,
    "patch_size": 14,
    "mm_tokens_per_image": 4,
    "image_token_index": 500,
    "boi_token_index": 501,
    "eoi_token_index": 502,
}
"""Values by the configuration's own key. Only keys that a configuration has, and sets, are used."""

DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout")
"""Set to zero: two models have to see the same numbers in training mode too."""


def tiny_config(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A small configuration of `config_class`, with everything the class distinguishes still in it.

    Layer types that the default configuration mixes are all there, one layer each.

    Args:
        config_class: the class.
        overrides: values the rules here cannot know; a mapping for a nested configuration.
    """
    default = config_class()
    overrides = dict(overrides or {})
    values: dict[str, Any] = {}
    for key in default.to_dict():
        value = getattr(default, key, None)
        if isinstance(value, PreTrainedConfig):
            values[key] = tiny_config(type(value), overrides.pop(key, None))
        elif key in TINY and (value is not None or key in ("pad_token_id", "bos_token_id", "eos_token_id")):
            values[key] = TINY[key]
        elif key in DROPOUTS:
            values[key] = 0.0
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1:
        values["layer_types"], values["num_hidden_layers"] = kinds, len(kinds)
    if "num_local_experts" in values and "num_experts" in default.attribute_map:
        values.pop("num_experts", None)  # another name for the same value
    config = config_class(**(values | overrides))
    config.classifier_dropout = 0.0  # token classifiers take 0.1 where a configuration says nothing
    return config
