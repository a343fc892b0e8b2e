"""Mistral: Llama's layers with sliding-window attention."""

from nrl_models.families.facts import Family

FAMILY = Family(("MistralForCausalLM", "MistralForSequenceClassification", "MistralForTokenClassification"))
