"""Qwen3-MoE: Qwen3's attention over a sparse mixture of stacked experts, with dense layers in between."""

from nrl_models.families.facts import Family

FAMILY = Family(("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification", "Qwen3MoeForTokenClassification"))
