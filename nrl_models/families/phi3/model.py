"""Phi-3 and Phi-4: QKV and gate-up are combined on the hub already, so nothing is rewritten."""

from transformers.models.phi3 import modeling_phi3 as hf

from nrl_models.common import FamilyModel
from nrl_models.common.configurations import decoder_sizes


class Phi3Family(FamilyModel):
    """What every Phi3 model shares."""


Phi3ForCausalLM = ModelClass = Phi3Family.head(
    hf.Phi3ForCausalLM, published={"Phi-4": decoder_sizes(100352, 5120, 17920, 40, 40, 10)}
)
Phi3ForSequenceClassification = Phi3Family.head(hf.Phi3ForSequenceClassification)
Phi3ForTokenClassification = Phi3Family.head(hf.Phi3ForTokenClassification)
