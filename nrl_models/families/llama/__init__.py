"""Llama: grouped-query attention and SwiGLU."""

from nrl_models.families.facts import Family

FAMILY = Family(
    ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForTokenClassification"),
    aliases={"LLaMAForCausalLM": "LlamaForCausalLM"},  # in checkpoints of before transformers had it
)
