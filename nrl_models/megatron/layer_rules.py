"""Modules and parameters of Megatron-Core's decoder, and the names that transformers has for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Split(Enum):
    """How tensor parallelism shards a weight."""

    NOT = auto()
    ROWS = auto()
    """Weight and bias by output features (`ColumnParallelLinear`)."""
    COLUMNS = auto()
    """Weight by input features; the bias is not sharded (`RowParallelLinear`)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Mapping of a module of Megatron's layer to a module of transformers' layer.

    Args:
        names: Possible names of the module in transformers.
        split: How it is sharded.
        fused: Its name with Transformer Engine if that stores a norm in the following linear, without `weight` or
            `bias`.
    """

    names: tuple[str, ...]
    split: Split = Split.NOT
    fused: str = ""


ATTENTION = {
    "self_attention.linear_proj": Rule(("self_attn.o_proj", "self_attn.dense"), Split.COLUMNS),
    "self_attention.q_layernorm": Rule(("self_attn.q_norm", "self_attn.q_layernorm", "self_attn.query_layernorm")),
    "self_attention.k_layernorm": Rule(("self_attn.k_norm", "self_attn.k_layernorm", "self_attn.key_layernorm")),
    "input_layernorm": Rule(("input_layernorm",), fused="self_attention.linear_qkv.layer_norm_"),
}
"""By Megatron's name, modules of a layer with attention over query groups."""


LATENT_ATTENTION = {
    "self_attention.linear_q_proj": Rule(("self_attn.q_proj",), Split.ROWS),
    "self_attention.linear_q_down_proj": Rule(("self_attn.q_a_proj",)),
    "self_attention.q_layernorm": Rule(
        ("self_attn.q_a_layernorm",), fused="self_attention.linear_q_up_proj.layer_norm_"
    ),
    "self_attention.linear_q_up_proj": Rule(("self_attn.q_b_proj",), Split.ROWS),
    "self_attention.linear_kv_down_proj": Rule(("self_attn.kv_a_proj_with_mqa",)),
    "self_attention.kv_layernorm": Rule(
        ("self_attn.kv_a_layernorm",), fused="self_attention.linear_kv_up_proj.layer_norm_"
    ),
    "self_attention.linear_kv_up_proj": Rule(("self_attn.kv_b_proj",), Split.ROWS),
    "self_attention.linear_proj": Rule(("self_attn.o_proj",), Split.COLUMNS),
    "input_layernorm": Rule(("input_layernorm",)),
}
"""The same of a layer with latent attention (MLA)."""


MLP = {
    "mlp.linear_fc2": Rule(("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h"), Split.COLUMNS),
    "pre_mlp_layernorm": Rule(("post_attention_layernorm",), fused="mlp.linear_fc1.layer_norm_"),
}
"""The same of a dense MLP, without its first linear."""


EXPERTS = {
    "mlp.shared_experts.linear_fc2": Rule(
        ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"), Split.COLUMNS
    ),
    "pre_mlp_layernorm": Rule(("post_attention_layernorm",)),
}
"""The same of a mixture of experts, without the experts, the router and the shared experts' first linear."""


ROUTER = {
    "mlp.router.weight": ("mlp.gate.weight", "mlp.router.weight"),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
}
"""By Megatron's name, tensors of a mixture of experts that no rank has a share of."""


FIRST_LINEARS = (
    ("gate_proj", "up_proj"),
    ("gate_up_proj",),
    ("up_proj",),
    ("c_fc",),
    ("fc1",),
    ("dense_h_to_4h",),
)
"""Possible names of the first linears of an MLP, the gate's first. The first existing one is used."""


OUTSIDE = {
    "embedding.word_embeddings.weight": ("embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("norm.weight", "final_layernorm.weight"),
    "decoder.final_layernorm.bias": ("norm.bias", "final_layernorm.bias"),
}
"""Parameters of the base model outside of its layers, by Megatron's name."""


HEAD = "lm_head.weight"


STATES = "_extra_state"
"""Part of Megatron's names for states of Transformer Engine, which are not weights. Empty without that package."""
