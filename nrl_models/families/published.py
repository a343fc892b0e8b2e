"""Configuration values of published models. The generated tests use their sizes at full size."""

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


DEEPSEEK_ROUTING = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
"""Configuration values of published models for routing as in DeepSeek-V3, the only supported one."""

MOONLIGHT = (
    decoder_sizes(163840, 2048, 11264, 27, 16, 16)
    | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1}
    | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"rope_theta": 800000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    | {"bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839}
)
"""Configuration of Moonlight-16B-A3B, which is also Kimi-VL-A3B's language model."""
