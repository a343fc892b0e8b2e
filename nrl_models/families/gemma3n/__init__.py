"""Gemma 3n: later layers attend to earlier layers' keys and values."""

from nrl_models.families.facts import Family

FAMILY = Family(
    ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), requires={"Gemma3nForConditionalGeneration": "timm>=1.0"}
)
