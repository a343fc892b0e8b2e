"""Qwen2.5-VL: a vision tower with windows and gated MLPs before Qwen2 with positions in three dimensions."""

from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Qwen25VLFamily(FamilyModel):
    """What every Qwen2.5-VL model shares."""

    rewrites = {
        hf.Qwen2_5_VLAttention: CombinedQKV,
        hf.Qwen2MLP: CombinedGateUp,
        hf.Qwen2_5_VLMLP: CombinedGateUp,  # of the vision tower
    }


Qwen2_5_VLForConditionalGeneration = ModelClass = Qwen25VLFamily.head(hf.Qwen2_5_VLForConditionalGeneration)
