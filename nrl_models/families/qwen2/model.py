"""Qwen2 and Qwen2.5: Llama's layers with biases on Q, K and V."""

from transformers.models.qwen2 import modeling_qwen2 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Qwen2Attention(CombinedQKV, hf.Qwen2Attention):
    """Attention with one biased projection for Q, K and V."""


class Qwen2MLP(CombinedGateUp, hf.Qwen2MLP):
    """SwiGLU with one projection for gate and up."""


class Qwen2Family(FamilyModel):
    """What every Qwen2 model shares."""

    rewrites = {hf.Qwen2Attention: Qwen2Attention, hf.Qwen2MLP: Qwen2MLP}


class Qwen2ForCausalLM(Qwen2Family, hf.Qwen2ForCausalLM):
    """Qwen2 with a language-model head."""


class Qwen2ForSequenceClassification(Qwen2Family, hf.Qwen2ForSequenceClassification):
    """Qwen2 with a score for a sequence (reward models)."""


class Qwen2ForTokenClassification(Qwen2Family, hf.Qwen2ForTokenClassification):
    """Qwen2 with a score for each token."""


ModelClass = Qwen2ForCausalLM
