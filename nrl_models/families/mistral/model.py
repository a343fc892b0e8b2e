"""Mistral: Llama's layers with sliding-window attention."""

from transformers.models.mistral import modeling_mistral as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel
from nrl_models.families.mistral.published import PUBLISHED


class MistralFamily(FamilyModel):
    """What every Mistral model shares."""

    rewrites = {hf.MistralAttention: CombinedQKV, hf.MistralMLP: CombinedGateUp}


MistralForCausalLM = ModelClass = MistralFamily.head(hf.MistralForCausalLM, published=PUBLISHED)
MistralForSequenceClassification = MistralFamily.head(hf.MistralForSequenceClassification)
MistralForTokenClassification = MistralFamily.head(hf.MistralForTokenClassification)
