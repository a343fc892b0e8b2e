"""Mixtral: Llama's attention over a sparse mixture of stacked experts."""

from transformers.models.mixtral import modeling_mixtral as hf

from nrl_models.common import CombinedQKV, FamilyModel
from nrl_models.families.mixtral.published import PUBLISHED


class MixtralFamily(FamilyModel):
    """What every Mixtral model shares."""

    rewrites = {hf.MixtralAttention: CombinedQKV}


MixtralForCausalLM = ModelClass = MixtralFamily.head(hf.MixtralForCausalLM, published=PUBLISHED)
MixtralForSequenceClassification = MixtralFamily.head(hf.MixtralForSequenceClassification)
MixtralForTokenClassification = MixtralFamily.head(hf.MixtralForTokenClassification)
