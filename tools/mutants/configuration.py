"""Bugs in reading the configuration: a family misreads a key or ignores it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tools.mutants.planting import Bug, Mutant, misread

WINDOWED = ("test_logits_equivalence", "test_cached_decode", "test_packing", "test_left_padding")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keys(pattern: str, change: Callable[[Any], Any], unless: str = "") -> Bug:
    """Change how numbers under matching keys are read. Other keys are unaffected."""

    def read(key: str, value: Any) -> Any:
        is_meant = re.search(pattern, key) and not (unless and re.search(unless, key))
        return change(value) if is_meant and _number(value) else value

    return misread(read)


def _flag(pattern: str) -> Bug:
    return misread(lambda key, value: not value if isinstance(value, bool) and re.search(pattern, key) else value)


def _no_factor(value: float) -> float:
    """Remove a factor by reading it as 1. Double it if it is 1 already."""
    return type(value)(1) if value != 1 else value * 2


def _one_fewer(count: int) -> int:
    return count - 1 if count > 1 else count + 1


def _exchanged_types(key: str, value: Any) -> Any:
    if key != "layer_types" or not isinstance(value, (list, tuple)):
        return value
    kinds = list(dict.fromkeys(kind for kind in value if "attention" in kind and "linear" not in kind))
    if len(kinds) != 2:
        return value
    other = {kinds[0]: kinds[1], kinds[1]: kinds[0]}
    return type(value)(other.get(kind, kind) for kind in value)


def _all_with_positions(key: str, value: Any) -> Any:
    return [1] * len(value) if key == "no_rope_layers" and value else value


def _rotated_sections(key: str, value: Any) -> Any:
    return [*value[1:], value[0]] if key == "mrope_section" and value else value


MUTANTS = (
    Mutant(
        "another rope base",
        "rope_theta's default in place of the model's",
        _keys(r"(rope|rotary|rot)_?\w*(theta|base)$", lambda base: type(base)(base * 10)),
    ),
    Mutant(
        "partial rope ignored",
        "every column of a head rotated",
        _keys(r"^(partial_rotary_factor|rotary_pct|rope_pct|rotary_percentage)$", lambda part: 1.0),
    ),
    Mutant("rope on every layer", "layers without positions (NoPE) given some", misread(_all_with_positions)),
    Mutant(
        "rope's pairs laid out otherwise",
        "interleaved pairs for halves, or the reverse",
        _flag(r"^(rope_interleave|rotary_interleaved|rope_interleaved|use_interleaved_rope|gptj_style)$"),
    ),
    Mutant(
        "sections of positions exchanged",
        "time, height and width of multimodal positions in another order",
        misread(_rotated_sections),
    ),
    Mutant(
        "final softcap missing",
        "logits without their tanh, as engines leave it out",
        _keys(r"^(final|output|logits)_\w*soft_?cap", lambda cap: None),
    ),
    Mutant(
        "softcap of a layer missing",
        "scores of attention or of a router without their tanh, as fused attention leaves it out",
        _keys(r"soft_?cap", lambda cap: cap * 1000, unless=r"^(final|output|logits)_"),
    ),
    Mutant(
        "window one word too short",
        "a sliding window that counts the word itself, or not",
        _keys(r"^((sliding|attention)_window(_size)?|local_attention|window_size|attention_chunk_size)$", _one_fewer),
        WINDOWED,
    ),
    Mutant("kinds of layers exchanged", "every second layer windowed: the others", misread(_exchanged_types), WINDOWED),
    Mutant(
        "one word too few attended to",
        "sparse attention that takes one fewer than index_topk",
        _keys(r"^index_topk$", _one_fewer),
        WINDOWED,
    ),
    Mutant(
        "one expert too few",
        "a router's top-k off by one",
        _keys(r"^(num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts|router_top_?k)$", _one_fewer),
    ),
    Mutant(
        "groups of experts ignored",
        "a router that chooses among all experts, or among too few groups",
        _keys(r"^topk_group$", lambda count: count + 1),
    ),
    Mutant(
        "routing weights not normalized",
        "norm_topk_prob not read",
        _flag(r"norm_top_?k|top_?k_norm|^route_norm$|renormali[sz]e"),
    ),
    Mutant(
        "routing weights unscaled",
        "routed_scaling_factor left out",
        _keys(r"^(moe_)?(routed|router|route)_scal(e|ing_factor)$", _no_factor),
    ),
    Mutant(
        "residual scale dropped",
        "the multiplier of residual branches or depth ignored",
        _keys(r"^(residual_multiplier|scale_depth|residual_scale|resid_multiplier|layer_scale_factor)$", _no_factor),
    ),
    Mutant(
        "logits scale dropped",
        "a factor on the logits that the loss sees and an engine does not, or the reverse",
        _keys(r"^(logits?_scal(e|ing)|lm_head_multiplier|output_multiplier|logits_mup_width_multiplier)$", _no_factor),
    ),
    Mutant(
        "attention multiplier dropped",
        "the model's own scale of scores, or of keys, taken for the usual one",
        _keys(
            r"^(attention|key|attention_out|attention_in)_multiplier$|^query_pre_attn_scalar$", lambda value: value * 2
        ),
    ),
    Mutant(
        "clipping dropped",
        "queries, keys and values, or an activation, that are not clamped",
        _keys(r"^(clip_qkv|swiglu_limit|swiglu_clamp_limit|activation_clip\w*)$", lambda clip: type(clip)(clip * 1000)),
    ),
)
