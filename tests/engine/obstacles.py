"""Why architectures cannot be run with an engine: the stage that fails, and the known causes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from nrl_models import registry


class Stage(StrEnum):
    """The stage of a comparison that fails, so that nothing is compared."""

    REQUIREMENT = "requirement"
    MODEL = "tiny model"
    START = "start"
    RUN = "run"


WORDS = {
    Stage.MODEL: "No usable tiny model",
    Stage.START: "The engine does not start",
    Stage.RUN: "The engine fails",
}
"""The stages, as the pages name them."""


def obstacle(architecture: str, stage: Stage, causes: Mapping[str, str]) -> str:
    """Describe why an architecture is not run.

    Args:
        architecture: The architecture, or one of its variants.
        stage: The stage that fails.
        causes: The known causes by architecture.
    """
    if stage is Stage.REQUIREMENT:
        return f"Needs {', '.join(registry._REQUIREMENTS.get(architecture, ())) or 'other package versions'}"
    return f"{WORDS[stage]}{f': {cause}' if (cause := causes.get(architecture)) else ''}"


def _unread(key: str, part: str = "configuration") -> str:
    return f"vLLM reads `{key}`, which transformers' {part} does not have"


SPARSE = "vLLM has no sparse attention for CPUs"
SOFTMAX = "vLLM's experts on CPUs support only softmax scores"
FLASH = "vLLM's sparse attention requires FlashAttention"
IMAGES_REQUIRED = "building one includes a forward pass on text alone, which its class does not support"
SCAN = "vLLM's build for CPUs lacks the kernel `selective_scan_fwd`"
NUMBER = "vLLM expects a number where transformers' configuration has a list"

VLLM = {
    "Blip2ForConditionalGeneration": IMAGES_REQUIRED,
    "DeepseekV32ForCausalLM": SPARSE,
    "Ernie4_5_VLMoeForConditionalGeneration": _unread("embed_dim", "vision configuration"),
    "FalconMambaForCausalLM": SCAN,
    "Glm5NextForConditionalGeneration": "its sparse attention does not support the tiny model's rotary dimensions",
    "GlmMoeDsaForCausalLM": SPARSE,
    "HYV4ForCausalLM": "its tiny configuration leads to a negative layer size",
    "InklingForCausalLM": "vLLM needs a tokenizer for it",
    "JambaForCausalLM": SCAN,
    "KimiK25ForConditionalGeneration": "vLLM needs an image processor for it",
    "KimiLinearForCausalLM": "vLLM sets `mamba_block_size`, which it accepts only with prefix caching",
    "LagunaForCausalLM": SOFTMAX,
    "LongcatFlashForCausalLM": "vLLM's build for CPUs lacks the kernel `topk_softmax`",
    "MambaForCausalLM": SCAN,
    "MiniMaxM2ForCausalLM": SOFTMAX,
    "MiniMaxM3SparseForConditionalGeneration": _unread("img_token_compression_config"),
    "NemotronH_Omni_Reasoning_V3": "its class has no output embedding",
    "OlmoHybridForCausalLM": "vLLM calls `triton.set_allocator`, which the installed triton does not have",
    "PaliGemmaForConditionalGeneration": "log-probabilities need `token_type_ids`, which vLLM does not take",
    "QianfanOCRForConditionalGeneration": NUMBER,
    "Qwen4ExpForCausalLM": FLASH,
    "Qwen4ExpForConditionalGeneration": FLASH,
    "Step3p7ForConditionalGeneration": _unread("output_dim", "vision configuration"),
    "VibeVoiceAsrForConditionalGeneration": "vLLM needs a feature extractor for it",
    "VoxtralForConditionalGeneration": _unread("downsample_factor", "audio configuration"),
}
"""Known causes with vLLM, without images."""

IMAGES = {
    "Blip2ForConditionalGeneration": IMAGES_REQUIRED,
    "Ernie4_5_VLMoeForConditionalGeneration": _unread("spatial_conv_size"),
    "Glm5NextForConditionalGeneration": "vLLM sets `mamba_block_size`, which it accepts only with prefix caching",
    "KimiK25ForConditionalGeneration": "vLLM runs transformers' class, which lacks tensors of the vision tower",
    "KimiVLForConditionalGeneration": "transformers has no image processor for it",
    "LlavaNextVideoForConditionalGeneration": "vLLM starts it as a model without images",
    "MiniMaxM3SparseForConditionalGeneration": _unread("img_token_compression_config"),
    "NemotronH_Omni_Reasoning_V3": "transformers has no image processor for it",
    "PaliGemmaForConditionalGeneration": "vLLM adds a token after the prompt, so it cannot score given tokens",
    "QianfanOCRForConditionalGeneration": NUMBER,
    "Qwen4ExpForConditionalGeneration": FLASH,
    "SmolVLMForConditionalGeneration": "its processor needs the package `num2words`",
    "Step3p7ForConditionalGeneration": _unread("output_dim", "vision configuration"),
}
"""Known causes with vLLM and images."""


def _required(*keys: str) -> str:
    return f"mlx-lm requires {', '.join(f'`{key}`' for key in keys)}, which the configuration does not have"


MLX_NAMES = "mlx-lm expects other tensor names"
MLX_EXPERTS = "mlx-lm expects other tensor names for experts"

MLX = {
    "BailingHybridForCausalLM": _required("group_norm_size"),
    "BitNetForCausalLM": "mlx-lm loads it only quantized, with `weight_scale`",
    "ExaoneMoeForCausalLM": _required("is_moe_layer"),
    "GPT2LMHeadModel": _required("n_ctx"),
    "GPTBigCodeForCausalLM": "mlx-lm requires a number as `n_inner`, which is None in the configuration",
    "GPTNeoXForCausalLM": _required("rotary_emb_base", "rotary_pct"),
    "Gemma3nForConditionalGeneration": "mlx-lm expects key projections also in layers that reuse other keys",
    "GptOssForCausalLM": MLX_EXPERTS,
    "GraniteMoeHybridForCausalLM": "mlx-lm does not have the layer type `linear_attention`",
    "KimiLinearForCausalLM": _required("linear_attn_config"),
    "KimiVLForConditionalGeneration": "transformers does not have the model type `kimi_vl`",
    "Kimi_K25ForConditionalGeneration": MLX_NAMES,
    "Lfm2ForCausalLM": "mlx-lm has no convolution in the first layer",
    "Llama4ForCausalLM": "mlx-lm expects the tensor names of the model with images",
    "LongcatFlashForCausalLM": "mlx-lm builds fewer experts",
    "Mamba2ForCausalLM": _required("intermediate_size"),
    "MiMoV2FlashForCausalLM": _required(
        "add_full_attention_sink_bias", "n_shared_experts", "topk_method", "scoring_func"
    ),
    "MiniCPM3ForCausalLM": "mlx-lm reads a group of settings that is None in the configuration",
    "MiniMaxForCausalLM": _required("shared_intermediate_size", "rotary_dim"),
    "MiniMaxM2ForCausalLM": _required("shared_intermediate_size"),
    "Mistral4ForCausalLM": "its forward pass adds two tensors, whose sizes do not match at the tiny size",
    "MuseGlimmerForConditionalGeneration": "mlx-lm has no vision tower for it",
    "MuseSparkForConditionalGeneration": "mlx-lm's kernel needs an Apple GPU",
    "NanoChatForCausalLM": MLX_NAMES,
    "OlmoForCausalLM": "mlx-lm needs the package `ai2-olmo`",
    "OlmoHybridForCausalLM": "the checkpoint has layer norms that mlx-lm's model does not have",
    "Qwen3VLMoeForConditionalGeneration": "mlx-lm expects transposed experts",
    "Qwen3_5MoeForConditionalGeneration": MLX_EXPERTS,
}
"""Known causes with MLX."""
