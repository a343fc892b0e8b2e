"""Tiny models of every GGUF architecture that transformers reads, written like llama.cpp's converter does.

Tensor names come from llama.cpp's package (`gguf.get_tensor_name_map`). Architecture names and keys are those that its
converter writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from gguf_checkpoints import add_value, rotated_in_pairs
from transformers import PreTrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
DENSE = SIZES | HEADS

Arrays = dict[str, np.ndarray]


def unchanged(name: str, array: np.ndarray, config: Any) -> Arrays:
    return {name: array}


def llama_rows(name: str, array: np.ndarray, config: Any) -> Arrays:
    for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
        if part in name:
            return {name: rotated_in_pairs(array, heads)}
    return {name: array}


def norms_plus_one(name: str, array: np.ndarray, config: Any) -> Arrays:
    return {name: array + 1 if name.endswith("norm.weight") else array}


def gpt2_rows(name: str, array: np.ndarray, config: Any) -> Arrays:
    is_transposed = name.endswith(("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"))
    return {name: np.ascontiguousarray(array.T) if is_transposed else array}


def bloom_rows(name: str, array: np.ndarray, config: Any) -> Arrays:
    """Order rows as queries, keys and values of all heads. transformers orders them head by head."""
    if "attn_qkv" not in name:
        return {name: array}
    by_head = array.reshape(config.n_head, 3, -1, *array.shape[1:])
    return {name: np.ascontiguousarray(by_head.swapaxes(0, 1).reshape(array.shape))}


def mamba_parts(name: str, array: np.ndarray, config: Any) -> Arrays:
    if name.endswith("ssm_a"):
        return {name: -np.exp(array)}
    return {name: array.squeeze(1) if "ssm_conv1d.weight" in name else array}


def lfm2_parts(name: str, array: np.ndarray, config: Any) -> Arrays:
    return {name: array.squeeze(1) if "shortconv.conv.weight" in name else array}


def layer_scales(name: str, array: np.ndarray, config: Any) -> Arrays:
    return {f"{name}.weight" if name.endswith("layer_output_scale") else name: array}


def split_experts(name: str, array: np.ndarray, config: Any) -> Arrays:
    if "gate_up_proj" in name:
        layer = name.split(".")[2]
        gate, up = np.split(array, 2, axis=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate.copy(), f"blk.{layer}.ffn_up_exps.weight": up.copy()}
    if name.endswith("_exps"):
        return {f"{name}.weight": array}
    if name.endswith("e_score_correction_bias"):
        return {f"blk.{name.split('.')[2]}.exp_probs_b.bias": array}
    return {name: array.squeeze(0) if "ffn_gate_inp_shexp" in name else array}


@dataclass(frozen=True)
class Case:
    """A model, and the way llama.cpp writes it.

    Args:
        config: The model's configuration.
        keys: The metadata.
        convert: Converts a tensor, given llama.cpp's name, or transformers' name if llama.cpp has none.
        tolerance: Tolerance of logits.
        since: The first transformers that computes such a file.
    """

    config: PreTrainedConfig
    keys: Mapping[str, Any]
    convert: Callable[[str, np.ndarray, Any], Arrays] = unchanged
    tolerance: float = 1e-6
    since: str = "5.5"


BASE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "vocab_size": 320,
}
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
ROPE = {"rope.freq_base": 50_000.0, "rope.dimension_count": 16}
HEAD = {"attention.key_length": 16, "attention.value_length": 16}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def config(name: str, **values: Any) -> PreTrainedConfig:
    config_class = getattr(transformers, f"{name}Config")
    return config_class(**DENSE | values, bos_token_id=0, eos_token_id=1, pad_token_id=0)


CASES: dict[str, Case] = {
    "llama": Case(config("Llama", rms_norm_eps=1e-5, head_dim=16, **THETA), BASE | RMS | ROPE | HEAD, llama_rows),
    "qwen2": Case(config("Qwen2", rms_norm_eps=1e-5, **THETA), BASE | RMS | ROPE),
    "qwen3": Case(config("Qwen3", rms_norm_eps=1e-5, head_dim=16, **THETA), BASE | RMS | ROPE | HEAD),
    "qwen2moe": Case(
        config(
            "Qwen2Moe",
            rms_norm_eps=1e-5,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            norm_topk_prob=False,
            **THETA,
        ),
        BASE | RMS | ROPE | EXPERTS | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
        split_experts,
    ),
    "qwen3moe": Case(
        config(
            "Qwen3Moe",
            rms_norm_eps=1e-5,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            **THETA,
        ),
        BASE | RMS | ROPE | HEAD | EXPERTS | {"expert_feed_forward_length": 32, "expert_weights_norm": True},
        split_experts,
    ),
    "minimax-m2": Case(
        config(
            "MiniMaxM2",
            rms_norm_eps=1e-5,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
        ),
        BASE | RMS | ROPE | HEAD | EXPERTS | {"rope.dimension_count": 8, "expert_gating_func": 2},
        split_experts,
        since="5.18",  # earlier ones ignore `rotary_dim`
    ),
    "phi3": Case(
        config("Phi3", rms_norm_eps=1e-5, sliding_window=None, **THETA),
        BASE | RMS | ROPE | {"attention.sliding_window": 0, "rope.scaling.original_context_length": 128},
    ),
    "falcon": Case(
        transformers.FalconConfig(
            vocab_size=320,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=1,
        ),
        BASE | LAYER_NORM | {"feed_forward_length": 256, "attention.head_count_kv": 1, "tensor_data_layout": "jploski"},
    ),
    "bloom": Case(
        transformers.BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1),
        BASE | LAYER_NORM | {"feed_forward_length": 256, "attention.head_count_kv": 4, "context_length": 64},
        bloom_rows,
    ),
    "gpt2": Case(
        transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=128),
        BASE | LAYER_NORM | {"feed_forward_length": 256, "attention.head_count_kv": 4},
        gpt2_rows,
    ),
    "stablelm": Case(
        config(
            "StableLm",
            layer_norm_eps=1e-5,
            use_parallel_residual=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        ),
        BASE | LAYER_NORM | {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "starcoder2": Case(config("Starcoder2", norm_epsilon=1e-5, **THETA), BASE | LAYER_NORM | ROPE),
    "nemotron": Case(
        config(
            "Nemotron",
            norm_eps=1e-5,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
        ),
        BASE | LAYER_NORM | ROPE | {"rope.dimension_count": 8, "rope.scaling.type": "none"},
        norms_plus_one,
        tolerance=1e-4,
    ),
    "mamba": Case(
        transformers.MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=8),
        {
            "block_count": 2,
            "context_length": 2**20,
            "embedding_length": 64,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "vocab_size": 320,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
            "ssm.dt_b_c_rms": False,
        }
        | RMS,
        mamba_parts,
        tolerance=1e-4,
    ),
    "gemma2": Case(
        config("Gemma2", rms_norm_eps=1e-5, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
        BASE
        | RMS
        | HEAD
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 8},
        norms_plus_one,
        tolerance=1e-4,
    ),
    "gemma3": Case(
        transformers.Gemma3TextConfig(
            **DENSE,
            rms_norm_eps=1e-5,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
            bos_token_id=0,
            eos_token_id=1,
        ),
        BASE
        | RMS
        | HEAD
        | {"rope.freq_base": 1e6, "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]},
        norms_plus_one,
        tolerance=1e-4,
    ),
    "gemma4": Case(
        transformers.Gemma4TextConfig(
            **DENSE,
            rms_norm_eps=1e-5,
            head_dim=16,
            global_head_dim=32,
            hidden_size_per_layer_input=8,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            final_logit_softcapping=30.0,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        ),
        BASE
        | RMS
        | {
            "attention.key_length": 32,
            "attention.key_length_swa": 16,
            "attention.shared_kv_layers": 0,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False],
            "attention.value_length": 32,
            "attention.value_length_swa": 16,
            "embedding_length_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
            "rope.dimension_count": 32,
            "rope.dimension_count_swa": 16,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
        layer_scales,
        since="5.11",
    ),
    "lfm2": Case(
        config(
            "Lfm2",
            norm_eps=1e-5,
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"],
            **THETA,
        ),
        BASE | RMS | {"rope.freq_base": 50_000.0, "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
        lfm2_parts,
    ),
}


def write(
    file: Path,
    model: PreTrainedModel,
    architecture: str,
    case: Case,
    extra: Mapping[str, np.ndarray] | None = None,
    title: str = "Tiny",
    **changed: Any,
) -> None:
    """Write a model as llama.cpp's converter does, with additional tensors and metadata (None removes a key)."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name(title)
    for key, value in {**case.keys, **changed}.items():
        if value is not None:
            add_value(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    writer.add_pad_token_id(0)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, 2)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        # llama.cpp's converter reads Bloom's base model, whose names have no prefix.
        known = (names.get_name(each, (".weight", ".bias")) for each in (name, name.removeprefix("transformer.")))
        stored = next(filter(None, known), name)
        for written, array in case.convert(stored, tensor.float().numpy(), model.config).items():
            writer.add_tensor(written, np.ascontiguousarray(array))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
