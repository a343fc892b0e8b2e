"""Qwen2-VL: a vision tower with packed projections before Qwen2 with positions in three dimensions."""

from transformers.models.qwen2_vl import modeling_qwen2_vl as hf

from nrl_models.common.forward.mrope import FreshPositions, PackedTextPositions
from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Qwen2VLFamily(FamilyModel):
    """Declarations shared by all Qwen2-VL models."""

    handles_quirks = ("tower-names",)  # published checkpoints name the tower outside the inner model
    # The tower's sizes under former names.
    config_values = {"in_chans": (3,), "spatial_patch_size": (14,)}
    ignored_config_keys = ("vision_token_id",)
    rewrites = {
        hf.Qwen2VLAttention: CombinedQKV,
        hf.Qwen2MLP: CombinedGateUp,
        hf.Qwen2VLTextModel: PackedTextPositions,
        hf.Qwen2VLModel: FreshPositions,
    }


Qwen2VLForConditionalGeneration = ModelClass = Qwen2VLFamily.head(
    hf.Qwen2VLForConditionalGeneration,
    published={
        "Qwen2-VL-7B": {
            "text_config": decoder_sizes(152064, 3584, 18944, 28, 28, 4),
            "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584},
        },
        "Qwen2-VL-72B": {
            "text_config": decoder_sizes(152064, 8192, 29568, 80, 64, 8),
            "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 8192},
        },
    },
)
