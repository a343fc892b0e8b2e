"""Gemma 4: dense, mixture of experts, and shared keys and values."""

from nrl_models.families.facts import Family

FAMILY = Family(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"))
