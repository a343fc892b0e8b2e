"""Qwen3.5: gated delta nets, gated attention in every fourth layer; text alone or with a vision tower."""

from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, combine
from nrl_models.common.mrope import FreshPositions


class Qwen35Family(FamilyModel):
    """What every Qwen3.5 model shares."""

    rewrites = {
        hf.Qwen3_5GatedDeltaNet: combine(in_proj=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
        hf.Qwen3_5Attention: CombinedQKV,  # `q_proj` gives the gate, too
        hf.Qwen3_5MLP: CombinedGateUp,
        hf.Qwen3_5Model: FreshPositions,
    }
    limits = {"packed sequences": "upstream's gated delta nets carry their state from a document to the next"}


Qwen3_5ForCausalLM = ModelClass = Qwen35Family.head(hf.Qwen3_5ForCausalLM)
Qwen3_5ForConditionalGeneration = Qwen35Family.head(hf.Qwen3_5ForConditionalGeneration)
Qwen3_5ForSequenceClassification = Qwen35Family.head(hf.Qwen3_5ForSequenceClassification)
Qwen3_5ForTokenClassification = Qwen35Family.head(hf.Qwen3_5ForTokenClassification)
Qwen3_5TextForSequenceClassification = Qwen35Family.head(hf.Qwen3_5TextForSequenceClassification)
