"""Kimi K2.5: a vision tower before DeepSeek-V3."""
