"""Kimi-VL: a MoonViT vision tower before DeepSeek-V3."""
