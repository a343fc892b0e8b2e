"""Settings that tiny models need to run in vLLM: keys of published configurations, a dtype, an option."""

from __future__ import annotations

from typing import Any

BOUND = 1.0001
"""Limit of `token_mult_prob_error` in fp32. In another precision the measured noise floor is the limit."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}

LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
"""vLLM's kernels for latent attention only support the published sizes. On a CPU it also rotates partial heads
incorrectly (in place, as if they were complete) unless the rotary embedding is scaled, as in published models.
"""

DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""vLLM's CPU kernels for gated delta nets only support the published head size."""

OVERRIDES: dict[str, dict[str, Any]] = {
    # Published checkpoints select experts with keys that transformers does not have.
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    # The indexer rotates as many dimensions as attention.
    "DeepseekV32ForCausalLM": {"index_head_dim": 128},
    "GlmMoeDsaForCausalLM": {"index_head_dim": 128},
    # vLLM creates an unused norm in layers without experts, and expects it in the checkpoint.
    "AXK1ForCausalLM": {"first_k_dense_replace": 0},
    # vLLM reads these keys without a default.
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 32, "use_qk_norm": False}},
    "Glm4MoeLiteForCausalLM": {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
    "GptOssForCausalLM": {"rope_parameters": YARN},
    "HYV3ForCausalLM": {"expert_hidden_dim": 128, "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    # vLLM only supports a tied output embedding, as in the published model.
    "CohereCompassForConditionalGeneration": {
        "tie_word_embeddings": True,
        "text_config": {"tie_word_embeddings": True},
    },
    # The values of V2-Lite: vLLM selects experts by groups, and the default configuration has no groups.
    "DeepseekV2ForCausalLM": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    # transformers has only `hidden_size` for these sizes.
    "Lfm2ForCausalLM": {"block_dim": 256, "conv_dim": 256},
    "Lfm2VlForConditionalGeneration": {"text_config": {"block_dim": 256, "conv_dim": 256}},
    # vLLM requires sections that add up to the rotated dimensions: half of a head in GLM-4.1V, all of it in GLM-OCR. It
    # reads a key for biases, which transformers always has.
    "Glm4vForConditionalGeneration": {
        "text_config": {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
            },
        }
    },
    "GlmOcrForConditionalGeneration": {
        "text_config": {
            "head_dim": 32,
            "intermediate_size": 3 * 256,  # vLLM uses this width for the patch merger
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 1.0,
                "mrope_section": [4, 6, 6],
            },
        }
    },
    # Experts that are not square, so that their orientation is visible.
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"moe_intermediate_size": 96, "norm_topk_prob": True}},
    # The size that transformers derives from four adjacent patches.
    "MuseGlimmerForConditionalGeneration": {"vision_config": {"output_dim": 1024}},
    # vLLM has its experts only for GPUs. Published models of the first generation have none.
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "Qwen3NextForCausalLM": DELTA,
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5ForConditionalGeneration": {"text_config": DELTA},
    "Qwen3_5MoeForCausalLM": DELTA,
    "Qwen3_5MoeForConditionalGeneration": {"text_config": DELTA},
    "Qwen4ExpForCausalLM": {"output_gate_type": "sigmoid"},
    "Qwen4ExpForConditionalGeneration": {
        "text_config": {"output_gate_type": "sigmoid"},
        "vision_config": {"deepstack_visual_indexes": []},
    },
    "MiniCPMV4_6ForConditionalGeneration": {"text_config": DELTA},
    "MiniCPMV4_7ForConditionalGeneration": {"text_config": DELTA},
    # vLLM reads Mistral's name of the key that Hugging Face's files call `llama_4_scaling_beta`.
    "Ministral3ForCausalLM": {"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.1}},
    # The key names on the hub, which differ from those of transformers.
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": 8,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334,
        "add_swa_attention_sink_bias": True,
    },
    "KimiVLForConditionalGeneration": {"text_config": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}},
    # An attention chunk must be a multiple of the engine's blocks of 128 tokens. From `floor_scale` tokens on,
    # attention is scaled, which vLLM supports only for contexts above 32K. The published value exceeds the compared
    # lengths.
    "Llama4ForCausalLM": {"attention_chunk_size": 128, "floor_scale": 8192},
    "Llama4ForConditionalGeneration": {"text_config": {"attention_chunk_size": 128, "floor_scale": 8192}},
    "LongcatFlashForCausalLM": {
        "qk_head_dim": 192,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    # vLLM's code of this model supports neither scaled rotary embeddings nor kernels for published sizes.
    "MiniCPM3ForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""Configuration values that tiny models need for the engine, in addition to `LATENT` for latent attention."""

BF16 = frozenset(
    {
        "MiniCPMV4_6ForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForCausalLM",
        "Qwen4ExpForConditionalGeneration",
    }
)
"""Architectures with gated delta nets or sparse attention that vLLM only computes in bf16, as does the trainer."""

PROCESSORS = frozenset(
    {"Emu3ForConditionalGeneration", "Gemma3nForConditionalGeneration", "HunYuanVLForConditionalGeneration"}
)
"""Architectures for which vLLM requires an image processor even without images."""

TORCH_ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""vLLM's CPU kernel for rotary embeddings misreads heads in a separate dimension. Its torch implementation does not."""

OPTIONS: dict[str, dict[str, Any]] = {
    # Its tokens have inputs in addition to embeddings, which vLLM passes only to a multimodal model.
    "Gemma3nForConditionalGeneration": {
        "language_model_only": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0, "audio": 0},
    },
    # transformers saves its class name, for which vLLM would use that class.
    "PhiMoEForCausalLM": {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}},
    "Lfm2ForCausalLM": TORCH_ROTARY,
    "Lfm2MoeForCausalLM": TORCH_ROTARY,
    # With prefix caching, vLLM looks for convolution states that do not exist.
    "Lfm2VlForConditionalGeneration": TORCH_ROTARY | {"enable_prefix_caching": False},
}
"""vLLM options that an architecture needs to run correctly on a CPU."""
