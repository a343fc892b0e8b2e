"""Mistral: Llama's layers with sliding-window attention."""

from transformers.models.mistral import modeling_mistral as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class MistralAttention(CombinedQKV, hf.MistralAttention):
    """Sliding-window attention with one projection for Q, K and V."""


class MistralMLP(CombinedGateUp, hf.MistralMLP):
    """SwiGLU with one projection for gate and up."""


class MistralFamily(FamilyModel):
    """What every Mistral model shares."""

    rewrites = {hf.MistralAttention: MistralAttention, hf.MistralMLP: MistralMLP}


class MistralForCausalLM(MistralFamily, hf.MistralForCausalLM):
    """Mistral with a language-model head."""


class MistralForSequenceClassification(MistralFamily, hf.MistralForSequenceClassification):
    """Mistral with a score for a sequence (reward models)."""


class MistralForTokenClassification(MistralFamily, hf.MistralForTokenClassification):
    """Mistral with a score for each token."""


ModelClass = MistralForCausalLM
