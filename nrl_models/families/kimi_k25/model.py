"""Kimi K2.5: a vision tower for images and video, whose projections are one on the hub, before DeepSeek-V3."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.kimi_k25 import modeling_kimi_k25 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, combine
from nrl_models.families.kimi_k25.published import PUBLISHED


class KimiK25Family(FamilyModel):
    """What every Kimi K2.5 model shares."""

    config_values = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
    rewrites = {
        hf.Kimi_K25VisionAttention: CombinedQKV,
        deepseek_v3.DeepseekV3Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        deepseek_v3.DeepseekV3MLP: CombinedGateUp,
    }


Kimi_K25ForConditionalGeneration = ModelClass = KimiK25Family.head(
    hf.Kimi_K25ForConditionalGeneration, published=PUBLISHED
)
