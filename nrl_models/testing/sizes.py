"""Values of a tiny configuration by key: the data of `tiny_config`.

Keys are names in configurations, including public names of attribute maps (`hidden_size` for `n_embd`). If the tables
give a wrong value for a family, it sets its own in `tiny`. Add keys of several models here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any


def _by_key(groups: Mapping[Any, str]) -> dict[str, Any]:
    return {key: size for size, keys in groups.items() for key in keys.split()}


# Sizes

WIDTH = 256
"""Width of all inputs and outputs of projections in all parts, so that required equalities hold."""

SIZES: dict[str, Any] = _by_key(
    {
        # Text tokens, special tokens (FIRST_SPECIAL and above), and some rows that a head omits.
        512: """vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab
            ngram_vocab_size_base""",
        504: "unpadded_vocab_size",
        64: "codebook_size num_embeddings kv_lora_rank max_source_positions",
        WIDTH: """hidden_size d_model n_embd dim_model attention_hidden_size hidden_size_global
            max_position_embeddings n_positions n_ctx max_seq_len model_max_length""",
        384: """intermediate_size ffn_dim d_ff dff dim_ff encoder_ffn_dim decoder_ffn_dim n_inner d_inner mlp_dim
            ffn_hidden_size feed_forward_size dense_intermediate_size intermediate_size_mlp""",
        128: """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size share_expert_dim
            shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size""",
        96: "q_lora_rank",
        # Heads, and windows shorter than the test sequences.
        8: """num_attention_heads n_head n_heads num_heads attention_heads num_attention_heads_per_layer
            encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
            swa_num_attention_heads num_sliding_attention_heads resampler_n_heads
            mamba_num_heads mamba_n_heads n_mamba_heads
            sliding_window sliding_window_size attention_window_size local_attention attention_chunk_size index_topk
            floor_scale log_scaling_n_floor""",
        4: """num_key_value_heads num_kv_heads kv_n_heads n_head_kv swa_num_key_value_heads index_n_heads
            mm_tokens_per_image max_value_projector_patch_to_query_dict""",
        32: """head_dim d_kv dim_head d_head kv_channels attention_head_size attention_head_dim swa_head_dim v_head_dim
            index_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim
            resampler_head_dim mamba_head_dim mamba_headdim mamba_d_head
            ssm_state_size state_size mamba_d_state base_channels num_filters""",
        16: "hc_lowrank qk_rope_head_dim rotary_dim num_position_embeddings",
        # Images of sixteen patches.
        56: "image_size crop_size",
        14: "patch_size",
        # About 1 / sqrt(hidden_size): activations keep their size, so errors do not drown.
        0.06: "initializer_range init_std",
        # Small enough for tiny activations to reach.
        0.5: """swiglu_limit clip_qkv attn_logit_softcapping final_logit_softcapping logits_soft_cap
            output_logit_soft_cap mlp_gate_softcap mlp_up_softcap gate_soft_cap moe_router_logit_softcapping""",
    }
)
"""Value of each key. Lists keep their length and proportions, and never grow. Zero is unchanged: it means "none"."""

AT_MOST: dict[str, int] = _by_key(
    {
        4: """num_local_experts num_experts n_routed_experts moe_num_experts linear_num_heads linear_num_key_heads
            resampler_n_latents latent_query_num num_query_tokens""",
        2: """num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts n_group num_expert_group
            num_nextn_predict_layers n_shared_experts zero_expert_num n_groups mamba_n_groups mamba_ngroups index_kpool
            attn_layer_period expert_layer_period""",
        1: "depths topk_group attn_layer_offset expert_layer_offset",
        8: "linear_num_value_heads",
        64: "num_patches mamba_chunk_size",
    }
)
"""Counts, which are never raised: one group of experts stays one."""

VALUES: dict[str, Any] = {
    "axial_pos_shape": [4, 6],
    "block_types": ["recurrent", "attention"],
    "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
    "projector_patch_to_query_dict": {"16": 4},
}
"""Whole values, for keys that are set."""

DROPOUTS = ("dropout", "pdrop", "drop_path", "layerdrop")
"""Set to zero, because two models must compute the same values also in training mode."""

WIDTH_SUFFIXES = ("_size", "_dim", "_dims", "_channels", "_width", "_rank", "hidden_sizes")
"""Endings of keys for widths that are in no table. Large values become WIDTH."""

# Layers

LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "depth", "num_blocks"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
    *("num_global_layers", "resampler_depth", "aligner_num_add_layers", "conf_num_hidden_layers"),
)
"""Numbers of layers."""

LEADING = ("first_k_dense_replace", "num_dense_layers", "loop_layer_index_start", "loop_layer_index_end")
"""Number of first layers of another kind, or bounds of such a range of layers."""

TRAILING = ("num_kv_shared_layers",)
"""How many of the last layers are of another kind than the rest."""

INDEX_SUFFIXES = ("_layers", "_indexes", "_indices", "_idxs", "_ids")
"""Suffixes of config keys that list layer numbers."""

LAYER_REFERENCES = (
    "vision_feature_layer",
    "vision_feature_layers",
    "feature_layer",
    "spatial_vision_layer",
    "insert_layer_id",
)
"""Numbers of layers of another part, counted from either end."""

SHARED_BLOCKS = ("hybrid",)
"""Types of layers that share one block, which requires at least two of them to be tested."""

# Special tokens

COMMON_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIRST_SPECIAL = 480
"""First id of other special tokens. Equal tokens stay equal, and different ones different."""


def is_token(key: str) -> bool:
    """Return True if a key has the id of a special token, or a list of them."""
    return key.endswith(("_id", "token_ids", "token_index")) and "layer" not in key and "lang" not in key


# Equations

Equation = tuple[str, Callable[[SimpleNamespace], Any]]
"""A key, and a function that returns its value. Parts of a configuration are attributes."""

RELATIONS: tuple[Equation, ...] = (
    # Latent attention: every head has separate keys, and a head has a part with positions and a part without.
    ("qk_nope_head_dim", lambda c: c.qk_rope_head_dim),
    ("num_key_value_heads", lambda c: c.kv_lora_rank and c.num_attention_heads),
    ("head_dim", lambda c: c.qk_rope_head_dim),
    ("head_dim", lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim),
    ("qk_head_dim", lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim),
    # State spaces: the heads fill the expanded width.
    ("num_heads", lambda c: c.hidden_size * c.expand // c.head_dim),
    ("mamba_n_heads", lambda c: c.hidden_size * c.mamba_expand // c.mamba_d_head),
    ("n_mamba_heads", lambda c: c.hidden_size * c.mamba_expand // c.mamba_headdim),
    ("mamba_num_heads", lambda c: c.hidden_size * c.expand // c.mamba_head_dim),
    ("mamba_d_ssm", lambda c: c.mamba_n_heads * c.mamba_d_head),
    ("attention_hidden_size", lambda c: 2 * c.hidden_size),
    ("attention_head_dim", lambda c: 2 * c.hidden_size // c.num_attention_heads),
    # Towers: the output is a patch, or several patches or layers concatenated.
    ("hidden_size", lambda c: c.base_channels * c.channel_multiplier[-1]),
    ("merged_hidden_size", lambda c: c.hidden_size * c.spatial_merge_size**2),
    ("out_hidden_size", lambda c: c.vision_config.hidden_size * c.vision_config.merge_size**2),
    ("vision_output_dim", lambda c: c.hidden_size * (1 + len(c.intermediate_layers_indices))),
)
"""Equations that hold in the tiny configuration if they hold in the default one."""

LAWS: tuple[Equation, ...] = (
    # A group needs more experts than are chosen, or there is no choice.
    ("n_routed_experts", lambda c: c.n_group and c.n_group > 1 and 6),
    ("num_experts", lambda c: c.n_group and c.n_group > 1 and 6),
    # A router needs more experts than it chooses.
    ("num_experts", lambda c: c.num_experts == 1 and c.moe_topk and 4),
    ("moe_topk", lambda c: c.num_experts > 1 and c.moe_topk == 1 and 2),
    # A pixel shuffle converts positions to width.
    ("intermediate_size", lambda c: int(c.hidden_size / c.pixel_shuffle_ratio**2)),
    ("vision_output_dim", lambda c: c.pixel_shuffle_ratio and c.projector_output_dim),
)
"""Equations that hold in every model with these keys, even if the default configuration violates them."""

# Values that default configurations lack

_IMAGE_TOKEN, _LINE_TOKEN, _CODES = 500, 503, range(64)


def _vocabulary() -> dict[str, int]:
    """Return the tokens that models with discrete image codes look up by name (spellings of Chameleon and Emu3)."""
    letters = {code: "".join(chr(ord("A") + int(digit)) for digit in str(code)) for code in _CODES}
    return {
        "<image>": _IMAGE_TOKEN,
        "<|extra_200|>": _LINE_TOKEN,
        **{f"<|visual token {code:06d}|>": 400 + code for code in _CODES},
        **{f"IMGIMG{letters[code]}Z": 400 + code for code in _CODES},
    }


def _with_attention(layer_types: list[str] | None) -> list[str]:
    return [*layer_types[:-1], "full_attention"] if layer_types else ["conv", "full_attention"]


MISSING: dict[str, Any] = _by_key(
    {
        1: "n_shared_experts indexer_kv_heads",
        2: "num_hidden_layers num_experts_per_tok top_k_experts indexer_compress_ratio",
        4: "num_key_value_heads num_experts n_routed_experts num_local_experts indexer_n_heads",
        8: "sliding_window indexer_budget",
        32: "head_dim indexer_head_dim",
        128: "moe_intermediate_size shared_expert_intermediate_size",
        _IMAGE_TOKEN: "image_token_id image_token_index",
        501: "audio_token_id",
        502: "video_token_id video_token_index",
    }
) | {
    "layer_types": _with_attention,
    "mlp_layer_types": ["dense", "sparse"],
    "attn_layer_indices": [1],
    "rope_theta": 1e4,
    "clip_qkv": 0.5,
    "is_decoder": True,
    "default_language": "en_XX",
    "vision_config": {},
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[-2, 0], [-1, 1]],
    "vocabulary_map": _vocabulary(),
}
"""Values for keys that a configuration leaves unset or does not have. Only used if a class does not build or run
without
them. Functions get the current value of the key."""


def is_unset(key: str, value: Any) -> bool:
    """Return True if a value is unset: None, disabled, empty, or only layers without attention."""
    return (
        value is None or value is False or value == {} or (key == "layer_types" and set(value) == {"linear_attention"})
    )
