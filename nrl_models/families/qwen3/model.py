"""Qwen3: Llama's layers with RMS-normed queries and keys."""

from transformers.models.qwen3 import modeling_qwen3 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Qwen3Family(FamilyModel):
    """What every Qwen3 model shares."""

    rewrites = {hf.Qwen3Attention: CombinedQKV, hf.Qwen3MLP: CombinedGateUp}


Qwen3ForCausalLM = ModelClass = Qwen3Family.head(hf.Qwen3ForCausalLM)
Qwen3ForSequenceClassification = Qwen3Family.head(hf.Qwen3ForSequenceClassification)
Qwen3ForTokenClassification = Qwen3Family.head(hf.Qwen3ForTokenClassification)
