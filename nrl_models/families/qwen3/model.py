"""Qwen3: Llama's layers with RMS-normed queries and keys."""

from transformers.models.qwen3 import modeling_qwen3 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Qwen3Attention(CombinedQKV, hf.Qwen3Attention):
    """Attention with one projection for Q, K and V; the norms come after it."""


class Qwen3MLP(CombinedGateUp, hf.Qwen3MLP):
    """SwiGLU with one projection for gate and up."""


class Qwen3Family(FamilyModel):
    """What every Qwen3 model shares."""

    rewrites = {hf.Qwen3Attention: Qwen3Attention, hf.Qwen3MLP: Qwen3MLP}


class Qwen3ForCausalLM(Qwen3Family, hf.Qwen3ForCausalLM):
    """Qwen3 with a language-model head."""


class Qwen3ForSequenceClassification(Qwen3Family, hf.Qwen3ForSequenceClassification):
    """Qwen3 with a score for a sequence (reward models)."""


class Qwen3ForTokenClassification(Qwen3Family, hf.Qwen3ForTokenClassification):
    """Qwen3 with a score for each token."""


ModelClass = Qwen3ForCausalLM
