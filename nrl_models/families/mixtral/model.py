"""Mixtral: Llama's attention over a sparse mixture of stacked experts."""

from transformers.models.mixtral import modeling_mixtral as hf

from nrl_models.common import CombinedQKV, FamilyModel


class MixtralFamily(FamilyModel):
    """What every Mixtral model shares."""

    rewrites = {hf.MixtralAttention: CombinedQKV}


MixtralForCausalLM = ModelClass = MixtralFamily.head(hf.MixtralForCausalLM)
MixtralForSequenceClassification = MixtralFamily.head(hf.MixtralForSequenceClassification)
MixtralForTokenClassification = MixtralFamily.head(hf.MixtralForTokenClassification)
