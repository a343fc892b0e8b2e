"""Configuration of Kimi-VL and of MoonViT, its vision tower."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import DeepseekV3Config, PreTrainedConfig


@strict
class MoonViTConfig(PreTrainedConfig):
    """MoonViT: a vision transformer for images of any size, which are packed.

    Attributes:
        init_pos_emb_height: Rows of the learned position table, which is interpolated to the image's size.
        init_pos_emb_width: Columns of that table.
        merge_kernel_size: Rows and columns of patches that form one token.
    """

    model_type = "moonvit"
    base_config_key = "vision_config"

    patch_size: int = 14
    num_channels: int = 3
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    hidden_act: str = "gelu_pytorch_tanh"
    merge_kernel_size: list[int] | tuple[int, ...] = (2, 2)
    rope_theta: float | int = 10000.0
    initializer_range: float = 0.02


@strict
class KimiVLConfig(PreTrainedConfig):
    """Kimi-VL: MoonViT, a projector and DeepSeek-V3. Defaults are those of Kimi-VL-A3B.

    Attributes:
        vision_config: Configuration of the vision tower.
        text_config: Configuration of the language model.
        media_placeholder_token_id: Token id whose embeddings are replaced by image features.
        ignore_index: Label index ignored by the loss.
    """

    model_type = "kimi_vl"
    sub_configs = {"vision_config": MoonViTConfig, "text_config": DeepseekV3Config}
    attribute_map = {"image_token_id": "media_placeholder_token_id"}
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    media_placeholder_token_id: int = 163605
    ignore_index: int = -100
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Convert dictionaries of the sub-configurations to configuration objects."""
        for name, kind, default in (("vision_config", MoonViTConfig, {}), ("text_config", DeepseekV3Config, A3B)):
            given = getattr(self, name)
            if given is None or isinstance(given, dict):
                setattr(self, name, kind(**(default if given is None else given)))
        super().__post_init__(**kwargs)


A3B: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 800000.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
}
"""Kimi-VL-A3B's language model, Moonlight-16B-A3B."""
