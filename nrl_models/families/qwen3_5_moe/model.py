"""Qwen3.5-MoE: Qwen3.5 over a mixture of stacked and shared experts; text alone or with a vision tower."""

from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, combine
from nrl_models.common.mrope import FreshPositions


class Qwen35MoeFamily(FamilyModel):
    """What every Qwen3.5-MoE model shares."""

    rewrites = {
        hf.Qwen3_5MoeGatedDeltaNet: combine(in_proj=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
        hf.Qwen3_5MoeAttention: CombinedQKV,  # `q_proj` gives the gate, too
        hf.Qwen3_5MoeMLP: CombinedGateUp,
        hf.Qwen3_5MoeModel: FreshPositions,
    }
    limits = {"packed sequences": "upstream's gated delta nets carry their state from a document to the next"}


Qwen3_5MoeForCausalLM = ModelClass = Qwen35MoeFamily.head(hf.Qwen3_5MoeForCausalLM)
Qwen3_5MoeForConditionalGeneration = Qwen35MoeFamily.head(hf.Qwen3_5MoeForConditionalGeneration)
