"""Qwen2-VL: a vision tower with packed projections before Qwen2 with positions in three dimensions."""

from transformers.models.qwen2_vl import modeling_qwen2_vl as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Qwen2VLFamily(FamilyModel):
    """What every Qwen2-VL model shares."""

    rewrites = {
        hf.Qwen2VLAttention: CombinedQKV,
        hf.Qwen2MLP: CombinedGateUp,
    }


Qwen2VLForConditionalGeneration = ModelClass = Qwen2VLFamily.head(hf.Qwen2VLForConditionalGeneration)
