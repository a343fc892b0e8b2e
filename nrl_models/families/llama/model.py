"""Llama: grouped-query attention and SwiGLU."""

from transformers.models.llama import modeling_llama as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class LlamaFamily(FamilyModel):
    """What every Llama model shares."""

    rewrites = {hf.LlamaAttention: CombinedQKV, hf.LlamaMLP: CombinedGateUp}


LlamaForCausalLM = ModelClass = LlamaFamily.head(hf.LlamaForCausalLM)
LlamaForSequenceClassification = LlamaFamily.head(hf.LlamaForSequenceClassification)
LlamaForTokenClassification = LlamaFamily.head(hf.LlamaForTokenClassification)
