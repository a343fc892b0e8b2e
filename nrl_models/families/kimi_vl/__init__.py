"""Kimi-VL: a MoonViT vision tower before DeepSeek-V3."""

from nrl_models.families.facts import Family

FAMILY = Family(
    ("KimiVLForConditionalGeneration",),
    configs={"kimi_vl": "configuration:KimiVLConfig", "moonvit": "configuration:MoonViTConfig"},
)
