"""Families that represent all others in tests that are too slow for every family."""

ONE_OF_EACH_PATTERN = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
)
"""Names in `registry.FAMILIES`."""
