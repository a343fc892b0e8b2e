"""Qwen2 and Qwen2.5: Llama's layers with biases on Q, K and V."""

from transformers.models.qwen2 import modeling_qwen2 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Qwen2Family(FamilyModel):
    """What every Qwen2 model shares."""

    rewrites = {hf.Qwen2Attention: CombinedQKV, hf.Qwen2MLP: CombinedGateUp}


Qwen2ForCausalLM = ModelClass = Qwen2Family.head(hf.Qwen2ForCausalLM)
Qwen2ForSequenceClassification = Qwen2Family.head(hf.Qwen2ForSequenceClassification)
Qwen2ForTokenClassification = Qwen2Family.head(hf.Qwen2ForTokenClassification)
