"""Kimi K2.5: a vision tower for images and video, whose projections are one on the hub, before DeepSeek-V3."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.kimi_k25 import modeling_kimi_k25 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, combine
from nrl_models.families import decoder_sizes


class KimiK25Family(FamilyModel):
    """What every Kimi K2.5 model shares."""

    config_values = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
    rewrites = {
        hf.Kimi_K25VisionAttention: CombinedQKV,
        deepseek_v3.DeepseekV3Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        deepseek_v3.DeepseekV3MLP: CombinedGateUp,
    }


Kimi_K25ForConditionalGeneration = ModelClass = KimiK25Family.head(
    hf.Kimi_K25ForConditionalGeneration,
    published={
        "Kimi-K2.5 (1T)": {
            "text_config": decoder_sizes(163840, 7168, 18432, 61, 64, 64, model_type="deepseek_v3")
            | {"moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8}
            | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512}
        }
    },
)
