"""Qwen2.5-VL: a vision tower with windows and gated MLPs before Qwen2 with positions in three dimensions."""

from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from nrl_models.common.forward.mrope import FreshPositions, PackedTextPositions
from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Qwen25VLFamily(FamilyModel):
    """Declarations shared by all Qwen2.5-VL models."""

    handles_quirks = ("tower-names",)  # published checkpoints name the tower outside the inner model
    # The tower's sizes under former names.
    config_values = {"in_chans": (3,), "spatial_patch_size": (14,)}
    ignored_config_keys = ("vision_token_id",)
    rewrites = {
        hf.Qwen2_5_VLAttention: CombinedQKV,
        hf.Qwen2MLP: CombinedGateUp,
        hf.Qwen2_5_VLMLP: CombinedGateUp,  # of the vision tower
        hf.Qwen2_5_VLTextModel: PackedTextPositions,
        hf.Qwen2_5_VLModel: FreshPositions,
    }


Qwen2_5_VLForConditionalGeneration = ModelClass = Qwen25VLFamily.head(
    hf.Qwen2_5_VLForConditionalGeneration,
    published={
        "Qwen2.5-VL-7B": {
            "text_config": decoder_sizes(152064, 3584, 18944, 28, 28, 4),
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
        },
        "Qwen2.5-VL-72B": {
            "text_config": decoder_sizes(152064, 8192, 29568, 80, 64, 8),
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 8192},
        },
    },
)
