"""Mistral: Llama's layers with sliding-window attention."""

from transformers.models.mistral import modeling_mistral as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class MistralFamily(FamilyModel):
    """What every Mistral model shares."""

    rewrites = {hf.MistralAttention: CombinedQKV, hf.MistralMLP: CombinedGateUp}


MistralForCausalLM = ModelClass = MistralFamily.head(hf.MistralForCausalLM)
MistralForSequenceClassification = MistralFamily.head(hf.MistralForSequenceClassification)
MistralForTokenClassification = MistralFamily.head(hf.MistralForTokenClassification)
