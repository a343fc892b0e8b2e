"""Qwen2.5-VL."""

from nrl_models.families.facts import Family

FAMILY = Family(("Qwen2_5_VLForConditionalGeneration",))
