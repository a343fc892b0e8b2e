"""Configuration of Kimi-VL and of MoonViT, its vision tower."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import DeepseekV3Config, PreTrainedConfig

from nrl_models.families.published import MOONLIGHT


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
        for name, kind, default in (("vision_config", MoonViTConfig, {}), ("text_config", DeepseekV3Config, MOONLIGHT)):
            sub_config = getattr(self, name)
            if sub_config is None or isinstance(sub_config, dict):
                setattr(self, name, kind(**(default if sub_config is None else sub_config)))
        super().__post_init__(**kwargs)
