"""Llama: grouped-query attention and SwiGLU."""

from nrl_models.families.facts import Family

FAMILY = Family(("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForTokenClassification"))
