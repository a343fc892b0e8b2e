"""Qwen2-VL."""

from nrl_models.families.facts import Family

FAMILY = Family(("Qwen2VLForConditionalGeneration",))
