"""Qwen3: Llama's layers with RMS-normed queries and keys."""

from nrl_models.families.facts import Family

FAMILY = Family(("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"))
