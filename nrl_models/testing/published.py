"""Configurations of published models: what the generated tests hold names and shapes against at full size, on meta.

Sizes only, as the models' `config.json` on the hub give them; what a configuration class has by default is left out.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]


def _decoder(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, key_values: int, **more: Any
) -> Values:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        **more,
    }


def _baichuan(vocab: int, hidden: int, intermediate: int, layers: int, **more: Any) -> Values:
    sizes = _decoder(vocab, hidden, intermediate, layers, heads=layers, key_values=layers, **more)
    del sizes["num_key_value_heads"]  # of Baichuan's heads none share keys
    return sizes


def _nemotron_h(pattern: str, hidden: int, heads: int, key_values: int, **more: Any) -> Values:
    kinds = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
    return {
        "vocab_size": 131072,
        "hidden_size": hidden,
        "layers_block_type": [kinds[one] for one in pattern],
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        "head_dim": 128,
        "ssm_state_size": 128,
        "n_groups": 8,
        **more,
    }


_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
_PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_QWEN25_7B = _decoder(152064, 3584, 18944, 28, 28, 4)
_QWEN25_72B = _decoder(152064, 8192, 29568, 80, 64, 8)

PUBLISHED: dict[str, dict[str, Values]] = {
    "BaiChuanForCausalLM": {
        "Baichuan-7B": _baichuan(64000, 4096, 11008, 32, max_position_embeddings=4096),
    },
    "BaichuanForCausalLM": {
        "Baichuan-13B": _baichuan(64000, 5120, 13696, 40),
        "Baichuan2-7B": _baichuan(125696, 4096, 11008, 32, max_position_embeddings=4096),
        "Baichuan2-13B": _baichuan(125696, 5120, 13696, 40),
    },
    "DeepseekV3ForCausalLM": {
        "DeepSeek-V3 (671B)": _decoder(
            129280,
            7168,
            18432,
            61,
            128,
            128,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            q_lora_rank=1536,
            kv_lora_rank=512,
        ),
        "Moonlight-16B-A3B": _decoder(
            163840,
            2048,
            11264,
            27,
            16,
            16,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=None,
            kv_lora_rank=512,
        ),
    },
    "Gemma2ForCausalLM": {
        "Gemma-2-2B": _decoder(256000, 2304, 9216, 26, 8, 4, head_dim=256),
        "Gemma-2-9B": _decoder(256000, 3584, 14336, 42, 16, 8, head_dim=256),
        "Gemma-2-27B": _decoder(256000, 4608, 36864, 46, 32, 16, head_dim=128),
    },
    "Gemma3ForCausalLM": {"Gemma-3-1B": _decoder(262144, 1152, 6912, 26, 4, 1, head_dim=256)},
    "Gemma3ForConditionalGeneration": {
        "Gemma-3-4B": {
            "text_config": _decoder(262208, 2560, 10240, 34, 8, 4, head_dim=256),
            "vision_config": _SIGLIP,
        },
        "Gemma-3-27B": {
            "text_config": _decoder(262208, 5376, 21504, 62, 32, 16, head_dim=128),
            "vision_config": _SIGLIP,
        },
    },
    "Gemma3nForCausalLM": {
        "Gemma-3n-E2B": _decoder(
            262400, 2048, 8192, 30, 8, 2, num_kv_shared_layers=10, activation_sparsity_pattern=None
        ),
        "Gemma-3n-E4B": _decoder(262400, 2048, 16384, 35, 8, 2, num_kv_shared_layers=15),
    },
    "GptOssForCausalLM": {
        "gpt-oss-20b": _decoder(201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32),
        "gpt-oss-120b": _decoder(201088, 2880, 2880, 36, 64, 8, head_dim=64, num_local_experts=128),
    },
    "Kimi_K25ForConditionalGeneration": {
        "Kimi-K2.5 (1T)": {
            "text_config": {
                "model_type": "deepseek_v3",
                **_decoder(
                    163840,
                    7168,
                    18432,
                    61,
                    64,
                    64,
                    moe_intermediate_size=2048,
                    n_routed_experts=384,
                    n_shared_experts=1,
                    num_experts_per_tok=8,
                    n_group=1,
                    topk_group=1,
                    first_k_dense_replace=1,
                    q_lora_rank=1536,
                    kv_lora_rank=512,
                ),
            }
        }
    },
    "LlamaForCausalLM": {
        "Llama-3.2-1B": _decoder(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),
        "Llama-3.1-8B": _decoder(128256, 4096, 14336, 32, 32, 8),
        "Llama-3.1-70B": _decoder(128256, 8192, 28672, 80, 64, 8),
        "Llama-3.1-405B": _decoder(128256, 16384, 53248, 126, 128, 8),
    },
    "MistralForCausalLM": {
        "Mistral-7B-v0.3": _decoder(32768, 4096, 14336, 32, 32, 8),
        "Mistral-Nemo-12B": _decoder(131072, 5120, 14336, 40, 32, 8, head_dim=128),
    },
    "Mistral3ForConditionalGeneration": {
        "Mistral-Small-3.1-24B": {
            "text_config": {"model_type": "mistral", **_decoder(131072, 5120, 32768, 40, 32, 8, head_dim=128)},
            "vision_config": {"model_type": "pixtral", **_PIXTRAL},
        }
    },
    "MixtralForCausalLM": {
        "Mixtral-8x7B": _decoder(32000, 4096, 14336, 32, 32, 8),
        "Mixtral-8x22B": _decoder(32768, 6144, 16384, 56, 48, 8),
    },
    "NemotronHForCausalLM": {
        "Nemotron-Nano-9B-v2": _nemotron_h(
            "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            4480,
            40,
            8,
            intermediate_size=15680,
            mamba_num_heads=128,
            mamba_head_dim=80,
        ),
        "Nemotron-3-Nano-30B-A3B": _nemotron_h(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            2688,
            32,
            2,
            intermediate_size=1856,
            mamba_num_heads=64,
            mamba_head_dim=64,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
        ),
    },
    "Phi3ForCausalLM": {
        "Phi-3-mini-4k": _decoder(32064, 3072, 8192, 32, 32, 32),
        "Phi-4": _decoder(100352, 5120, 17920, 40, 40, 10),
    },
    "Qwen2ForCausalLM": {
        "Qwen2.5-0.5B": _decoder(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
        "Qwen2.5-7B": _QWEN25_7B,
        "Qwen2.5-72B": _QWEN25_72B,
    },
    "Qwen2VLForConditionalGeneration": {
        "Qwen2-VL-7B": {
            "text_config": _QWEN25_7B,
            "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584},
        },
        "Qwen2-VL-72B": {
            "text_config": _QWEN25_72B,
            "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 8192},
        },
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "Qwen2.5-VL-7B": {
            "text_config": _QWEN25_7B,
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
        },
        "Qwen2.5-VL-72B": {
            "text_config": _QWEN25_72B,
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 8192},
        },
    },
    "Qwen3ForCausalLM": {
        "Qwen3-0.6B": _decoder(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
        "Qwen3-8B": _decoder(151936, 4096, 12288, 36, 32, 8, head_dim=128),
        "Qwen3-32B": _decoder(151936, 5120, 25600, 64, 64, 8, head_dim=128),
    },
    "Qwen3MoeForCausalLM": {
        "Qwen3-30B-A3B": _decoder(
            151936, 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128
        ),
        "Qwen3-235B-A22B": _decoder(
            151936, 4096, 12288, 94, 64, 4, head_dim=128, moe_intermediate_size=1536, num_experts=128
        ),
    },
}
"""For each architecture its published models, by name, and their configurations' values."""
