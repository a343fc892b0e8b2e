"""Model families: which architectures each serves, one folder for a family, and `table` for those that need none.

Importing this imports no model: `nrl_models.registry` reads it.
"""

from typing import Any

FAMILIES: dict[str, tuple[str, ...]] = {
    "baichuan": (
        "BaichuanForCausalLM",
        "BaiChuanForCausalLM",
        "BaichuanForSequenceClassification",
        "BaichuanForTokenClassification",
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification", "DeepseekV3ForTokenClassification"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2ForTokenClassification"),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3ForSequenceClassification",
        "Gemma3TextForSequenceClassification",
    ),
    "gemma3n": ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    "gpt_oss": ("GptOssForCausalLM", "GptOssForSequenceClassification", "GptOssForTokenClassification"),
    "kimi_vl": ("KimiVLForConditionalGeneration",),
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForTokenClassification"),
    "mistral": ("MistralForCausalLM", "MistralForSequenceClassification", "MistralForTokenClassification"),
    "nemotron_h": ("NemotronHForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", "Qwen2ForTokenClassification"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification", "Qwen3MoeForTokenClassification"),
}
"""The families with a folder of their own, and the architectures each serves."""

ALIASES: dict[str, str] = {
    # Kimi K2.5's checkpoints and its trainers' own class, each named otherwise than transformers' class.
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "KimiK25VLForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
}
"""Other names that configurations have for an architecture. What is saved has the class's own."""

REQUIREMENTS: dict[str, str] = {"Gemma3nForConditionalGeneration": "timm>=1.0"}
"""For each architecture of these that needs more than this package does the requirement."""


def module_of(family: str) -> str:
    """The name of the module that has a family's classes."""
    return f"nrl_models.families.{family}.model" if family in FAMILIES else "nrl_models.families.table.classes"


def decoder_sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, key_values: int, **more: Any
) -> dict[str, Any]:
    """A decoder's sizes under the keys that most configurations have for them, and whatever else is given."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        **more,
    }
