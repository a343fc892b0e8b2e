"""Qwen2-VL: a vision tower with packed projections before Qwen2 with positions in three dimensions."""

from transformers.models.qwen2_vl import modeling_qwen2_vl as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel
from nrl_models.common.mrope import FreshPositions, PackedTextPositions
from nrl_models.families.qwen2_vl.published import PUBLISHED


class Qwen2VLFamily(FamilyModel):
    """What every Qwen2-VL model shares."""

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
    hf.Qwen2VLForConditionalGeneration, published=PUBLISHED
)
