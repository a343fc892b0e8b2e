"""Kimi-VL: a MoonViT vision tower, with Q, K and V packed on the hub already, and DeepSeek-V3."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

from nrl_models.common.projections import CombinedGateUp, combine
from nrl_models.families.kimi_vl import modeling as hf
from nrl_models.families.published import DEEPSEEK_ROUTING
from nrl_models.family import FamilyModel


class KimiVLFamily(FamilyModel):
    """Declarations shared by all Kimi-VL models."""

    # Without query compression, only one of the fused linears would have a bias.
    config_values = DEEPSEEK_ROUTING | {"attention_bias": (False,)}
    rewrites = {
        # The published text model does not compress queries: `q_proj`, not `q_a_proj`.
        deepseek_v3.DeepseekV3Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        deepseek_v3.DeepseekV3MLP: CombinedGateUp,
    }


KimiVLForConditionalGeneration = ModelClass = KimiVLFamily.head(hf.KimiVLForConditionalGeneration)
