"""Mixtral: Llama's attention over a sparse mixture of stacked experts."""

from transformers.models.mixtral import modeling_mixtral as hf

from nrl_models.common import CombinedQKV, FamilyModel


class MixtralAttention(CombinedQKV, hf.MixtralAttention):
    """Mixtral attention with one projection for Q, K and V."""


class MixtralFamily(FamilyModel):
    """What every Mixtral model shares."""

    rewrites = {hf.MixtralAttention: MixtralAttention}


class MixtralForCausalLM(MixtralFamily, hf.MixtralForCausalLM):
    """Mixtral with a language-model head."""


class MixtralForSequenceClassification(MixtralFamily, hf.MixtralForSequenceClassification):
    """Mixtral with a score for a sequence (reward models)."""


class MixtralForTokenClassification(MixtralFamily, hf.MixtralForTokenClassification):
    """Mixtral with a score for each token."""


ModelClass = MixtralForCausalLM
