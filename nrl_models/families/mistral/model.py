"""Mistral: Llama's layers with sliding-window attention."""

from transformers.models.mistral import modeling_mistral as hf

from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class MistralFamily(FamilyModel):
    """Declarations shared by all Mistral models."""

    rewrites = {hf.MistralAttention: CombinedQKV, hf.MistralMLP: CombinedGateUp}


MistralForCausalLM = ModelClass = MistralFamily.head(
    hf.MistralForCausalLM,
    published={
        "Mistral-7B-v0.3": decoder_sizes(32768, 4096, 14336, 32, 32, 8),
        "Mistral-Nemo-12B": decoder_sizes(131072, 5120, 14336, 40, 32, 8, head_dim=128),
    },
)
MistralForSequenceClassification = MistralFamily.head(hf.MistralForSequenceClassification)
MistralForTokenClassification = MistralFamily.head(hf.MistralForTokenClassification)
