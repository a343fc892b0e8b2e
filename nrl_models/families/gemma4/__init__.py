"""Gemma 4: dense, mixture of experts, and shared keys and values."""

from nrl_models.families.facts import Family

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")

FAMILY = Family(
    ARCHITECTURES,
    # In other versions, layers that share keys and values also have separate projections for them.
    requires=dict.fromkeys(ARCHITECTURES, ("transformers>=5.6,!=5.14.*",)),
)
