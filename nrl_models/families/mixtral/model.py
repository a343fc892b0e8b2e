"""Mixtral: Llama's attention over a sparse mixture of stacked experts."""

from transformers.models.mixtral import modeling_mixtral as hf

from nrl_models.common import CombinedQKV, FamilyModel
from nrl_models.common.configurations import decoder_sizes


class MixtralFamily(FamilyModel):
    """What every Mixtral model shares."""

    rewrites = {hf.MixtralAttention: CombinedQKV}


MixtralForCausalLM = ModelClass = MixtralFamily.head(
    hf.MixtralForCausalLM, published={"Mixtral-8x22B": decoder_sizes(32768, 6144, 16384, 56, 48, 8)}
)
MixtralForSequenceClassification = MixtralFamily.head(hf.MixtralForSequenceClassification)
MixtralForTokenClassification = MixtralFamily.head(hf.MixtralForTokenClassification)
