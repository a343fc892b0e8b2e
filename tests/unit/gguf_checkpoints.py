"""Write GGUF files from transformers' models as llama.cpp's converter does, independently of the code under test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names that differ if there are norms before and after a layer."""

CHAT_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    architecture: str,
    kinds: Mapping[str, Kind] | Kind = Kind.F32,
    *,
    values: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write `model` to `file`.

    Args:
        file: The target.
        model: The model.
        architecture: llama.cpp's name of the architecture.
        kinds: The GGUF type of matrices, or a mapping from name patterns to types. Vectors are fp32, as in llama.cpp.
            Types that only llama.cpp writes get random values.
        values: Additional metadata.
        extra: Additional tensors.
        tokenizer: Whether to write a tokenizer of single bytes and two merges.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture)
    config: Any = model.config
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float((config.rope_parameters or {}).get("rope_theta", 10_000.0)))
    writer.add_key_length(config.head_dim if getattr(config, "head_dim", None) else head_size(config))
    writer.add_vocab_size(config.vocab_size)
    for key, value in (values or {}).items():
        add_value(writer, key, value)
    if tokenizer:
        _add_tokenizer(writer, config.vocab_size)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, array in [*_converted(tensors, config, architecture), *(extra or {}).items()]:
        kind = kind_of(name, array, kinds)
        writer.add_tensor(name, _quantized(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata with the type of the Python value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def header_only(file: Path, architecture: str, keys: Mapping[str, Any]) -> Path:
    """Write a file that contains only metadata."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("Tiny")
    for key, value in keys.items():
        add_value(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def head_size(config: Any) -> int:
    return config.hidden_size // config.num_attention_heads


def kind_of(name: str, array: np.ndarray, kinds: Mapping[str, Kind] | Kind) -> Kind:
    if array.ndim < 2:
        return Kind.F32
    if isinstance(kinds, Kind):
        return kinds
    return next((kind for pattern, kind in kinds.items() if pattern in name), Kind.F32)


def _quantized(array: np.ndarray, kind: Kind) -> np.ndarray:
    """Quantize the tensor in blocks. Types that only llama.cpp writes get random blocks of the same size."""
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // block * nbytes)
        return np.random.default_rng(0).integers(0, 0x3B, shape, np.uint8)  # scales with such bytes are finite


def _converted(tensors: Mapping[str, torch.Tensor], config: Any, architecture: str) -> list[tuple[str, np.ndarray]]:
    result = []
    names = NAMES | (SANDWICH if "gemma" in architecture else {})
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        start = f"blk.{layer[1]}." if layer else ""
        rest = name[layer.end() :] if layer else name
        if rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            result += [(f"{start}ffn_gate_exps.weight", gate.copy()), (f"{start}ffn_up_exps.weight", up.copy())]
            continue
        if rest == "mlp.experts.down_proj":
            result.append((f"{start}ffn_down_exps.weight", array))
            continue
        module, _, suffix = rest.rpartition(".")
        if architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            array = rotated_in_pairs(array, heads)
        if "gemma" in architecture and "norm" in module:
            array = array + 1
        result.append((f"{start}{names[module]}.{suffix}", array))
    return result


def rotated_in_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows to llama.cpp's order for Llama: RoPE rotates adjacent rows, while transformers rotates halves."""
    size = array.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return array[order]


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<s>", "</s>", "<|endoftext|>", *bytes_to_unicode().values(), "he", "ll"]
    tokens += [f"<unused{index}>" for index in range(vocab_size - len(tokens))]
    ordinary, control = 1, 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token.startswith("<") and token != "<" else ordinary for token in tokens])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
