"""What architectures need to run on vLLM at tiny size: keys of published configurations, a dtype, an option."""

from __future__ import annotations

from typing import Any

BOUND = 1.0001
"""On `token_mult_prob_error` in fp32; in another precision as much as its measured noise floor explains."""

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
"""vLLM's kernels of latent attention are for the published sizes alone. On a CPU it also rotates a part of each head
wrongly (in place, as if it were a whole one) unless the rotary embedding is scaled, as it is in what is published."""

DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""vLLM's kernels of gated delta nets for CPUs are for the published size of a head alone."""

OVERRIDES: dict[str, dict[str, Any]] = {
    # How published checkpoints choose experts is said by keys that transformers does not know.
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    # The indexer rotates as many dimensions as attention does.
    "DeepseekV32ForCausalLM": {"index_head_dim": 128},
    "GlmMoeDsaForCausalLM": {"index_head_dim": 128},
    # vLLM gives layers without experts a norm that it never uses, and asks the checkpoint for it.
    "AXK1ForCausalLM": {"first_k_dense_replace": 0},
    # They read these keys without a default.
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 32, "use_qk_norm": False}},
    "Glm4MoeLiteForCausalLM": {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
    "GptOssForCausalLM": {"rope_parameters": YARN},
    "HYV3ForCausalLM": {"expert_hidden_dim": 128, "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    # vLLM has it with a tied output embedding alone, as it is published.
    "CohereCompassForConditionalGeneration": {
        "tie_word_embeddings": True,
        "text_config": {"tie_word_embeddings": True},
    },
    # As of V2-Lite: vLLM chooses experts by groups, of which a configuration without has none.
    "DeepseekV2ForCausalLM": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    # transformers knows these sizes as `hidden_size`.
    "Lfm2ForCausalLM": {"block_dim": 256, "conv_dim": 256},
    "Lfm2VlForConditionalGeneration": {"text_config": {"block_dim": 256, "conv_dim": 256}},
    # vLLM wants sections that fill what is rotated: half of a head in GLM-4.1V, all of it in GLM-OCR. Of biases it asks
    # a key, where transformers always has them.
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
            "intermediate_size": 3 * 256,  # as wide as the merger of patches, for which vLLM takes it
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 1.0,
                "mrope_section": [4, 6, 6],
            },
        }
    },
    # Experts that are not square: nothing else tells their orientation.
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"moe_intermediate_size": 96, "norm_topk_prob": True}},
    # What transformers computes, of four neighbours in a square.
    "MuseGlimmerForConditionalGeneration": {"vision_config": {"output_dim": 1024}},
    # vLLM has its experts for GPUs alone; published models of the first generation have none.
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
    # vLLM reads Mistral's own name of what Hugging Face's files have as `llama_4_scaling_beta`.
    "Ministral3ForCausalLM": {"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.1}},
    # The names on the hub, of which transformers knows others.
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
    # A chunk of attention is a whole number of the engine's blocks of 128 words. From `floor_scale` words on attention
    # is tuned, which vLLM does for contexts of more than 32K alone; the published one is beyond what is compared here.
    "Llama4ForCausalLM": {"attention_chunk_size": 128, "floor_scale": 8192},
    "Llama4ForConditionalGeneration": {"text_config": {"attention_chunk_size": 128, "floor_scale": 8192}},
    "LongcatFlashForCausalLM": {
        "qk_head_dim": 192,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    # vLLM's code of this model knows no scaled rotary embedding, nor has it kernels that need published sizes.
    "MiniCPM3ForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""What a tiny configuration has to have for the engine, beside `LATENT` where attention is latent."""

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
"""Those whose gated delta nets or sparse attention vLLM computes in bf16 alone: trainer and engine both have it."""

PROCESSORS = frozenset(
    {"Emu3ForConditionalGeneration", "Gemma3nForConditionalGeneration", "HunYuanVLForConditionalGeneration"}
)
"""Those for which vLLM wants a processor of images, though none are given."""

TORCH_ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""vLLM's kernel of rotary embeddings for CPUs misreads heads that come in a dimension of their own; its torch code does
not."""

OPTIONS: dict[str, dict[str, Any]] = {
    # Its tokens have inputs beside embeddings, which vLLM gives to a model that takes images alone.
    "Gemma3nForConditionalGeneration": {
        "language_model_only": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0, "audio": 0},
    },
    # transformers saves the name of its own class, for which vLLM runs that.
    "PhiMoEForCausalLM": {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}},
    "Lfm2ForCausalLM": TORCH_ROTARY,
    "Lfm2MoeForCausalLM": TORCH_ROTARY,
    # With a cache of prefixes vLLM looks for states of its convolutions, and finds none.
    "Lfm2VlForConditionalGeneration": TORCH_ROTARY | {"enable_prefix_caching": False},
}
"""Options of vLLM without which an architecture does not run on a CPU, or not rightly."""
