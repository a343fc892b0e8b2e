"""Gemma 2: soft-capped logits, norms before and after each block, alternating sliding windows."""

from nrl_models.families.facts import Family

FAMILY = Family(("Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2ForTokenClassification"))
