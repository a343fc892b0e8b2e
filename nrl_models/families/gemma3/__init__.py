"""Gemma 3: q/k norms, five sliding-window layers per full-attention layer; text-only or with a SigLIP vision tower."""

from nrl_models.families.facts import Family

FAMILY = Family(
    (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3ForSequenceClassification",
        "Gemma3TextForSequenceClassification",
    )
)
