"""Tiny models that stand for the published sizes of Gemma 4, whose features the default configuration lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nrl_models.common.upstream import has_reached


def wider_full_attention(*layers: int, **values: int) -> dict[str, Any]:
    """Return configuration keys that give full attention in these layers heads of 64, plus other values."""
    if has_reached("5.15"):
        return {"per_layer_config": {str(layer): {"head_dim": 64, **values} for layer in layers}}
    return {"global_head_dim": 64, **{f"num_global_{key.removeprefix('num_')}": value for key, value in values.items()}}


SOFT_CAP: Mapping[str, Any] = {"final_logit_softcapping": 0.5}  # small enough for tiny logits to reach
E2B: Mapping[str, Any] = {
    **SOFT_CAP,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    **wider_full_attention(1, 3, 5),
    "num_kv_shared_layers": 3,  # layers 3 to 5 use the keys and values of layers 1 and 2
    "use_double_wide_mlp": True,
}
K_EQ_V: Mapping[str, Any] = {
    **SOFT_CAP,
    "attention_k_eq_v": True,  # full attention has no `v_proj`
    **wider_full_attention(1, num_key_value_heads=2),
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",  # tokens of an image attend to each other
}
EXPERTS: Mapping[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 128,
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {"E2B": E2B, "26B-A4B": {**EXPERTS, **K_EQ_V}, "31B": K_EQ_V}

SMALL_TOWERS: Mapping[str, Any] = {"vision_config": {"use_clipped_linears": True}}
LARGE_TOWER: Mapping[str, Any] = {"audio_config": None, "vision_config": {"standardize": True}}
MULTIMODAL_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    name: {"text_config": values, **(SMALL_TOWERS if values is E2B else LARGE_TOWER)}
    for name, values in VARIANTS.items()
}
