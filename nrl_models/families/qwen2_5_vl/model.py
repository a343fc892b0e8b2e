"""Qwen2.5-VL: a vision tower with windows and gated MLPs before Qwen2 with positions in three dimensions."""

from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel
from nrl_models.common.mrope import FreshPositions, PackedTextPositions
from nrl_models.families.qwen2_5_vl.published import PUBLISHED


class Qwen25VLFamily(FamilyModel):
    """What every Qwen2.5-VL model shares."""

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
    hf.Qwen2_5_VLForConditionalGeneration, published=PUBLISHED
)
