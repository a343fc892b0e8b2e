"""Gemma 3n: later layers attend to earlier layers' keys and values."""

from nrl_models.families.facts import Family

SHARED = "transformers>=5.6"
"""In older versions, layers that share keys and values also had separate projections for them."""

FAMILY = Family(
    ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    requires={"Gemma3nForCausalLM": (SHARED,), "Gemma3nForConditionalGeneration": (SHARED, "timm>=1.0")},
)
