"""Phi-3 and Phi-4: QKV and gate-up are combined on the hub already, so nothing is rewritten."""

from transformers.models.phi3 import modeling_phi3 as hf

from nrl_models.common import FamilyModel


class Phi3ForCausalLM(FamilyModel, hf.Phi3ForCausalLM):
    """Phi-3 with a language-model head."""


class Phi3ForSequenceClassification(FamilyModel, hf.Phi3ForSequenceClassification):
    """Phi-3 with a score for a sequence (reward models)."""


class Phi3ForTokenClassification(FamilyModel, hf.Phi3ForTokenClassification):
    """Phi-3 with a score for each token."""


ModelClass = Phi3ForCausalLM
