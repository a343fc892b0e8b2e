"""Llama: grouped-query attention and SwiGLU."""

from transformers.models.llama import modeling_llama as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class LlamaAttention(CombinedQKV, hf.LlamaAttention):
    """Llama attention with one projection for Q, K and V."""


class LlamaMLP(CombinedGateUp, hf.LlamaMLP):
    """SwiGLU with one projection for gate and up."""


class LlamaFamily(FamilyModel):
    """What every Llama model shares."""

    rewrites = {hf.LlamaAttention: LlamaAttention, hf.LlamaMLP: LlamaMLP}


class LlamaForCausalLM(LlamaFamily, hf.LlamaForCausalLM):
    """Llama with a language-model head."""


class LlamaForSequenceClassification(LlamaFamily, hf.LlamaForSequenceClassification):
    """Llama with a score for a sequence (reward models)."""


class LlamaForTokenClassification(LlamaFamily, hf.LlamaForTokenClassification):
    """Llama with a score for each token."""


ModelClass = LlamaForCausalLM
