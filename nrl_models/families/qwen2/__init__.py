"""Qwen2 and Qwen2.5: Llama's layers with biases on Q, K and V."""

from nrl_models.families.facts import Family

FAMILY = Family(("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", "Qwen2ForTokenClassification"))
