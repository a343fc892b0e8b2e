"""Decoders with layers that keep a state: state-space models, gated delta nets, recurrences, convolutions."""

from nrl_models.common.flags import MTPForm
from nrl_models.families.limits import CACHED, LEFT, lacks
from nrl_models.families.table.row import (
    ALL_HEADS,
    CAUSAL,
    CAUSAL_AND_SEQUENCE,
    DELTA_NET,
    GATE_UP,
    QKV,
    Row,
)

ROWS: dict[str, Row] = {
    "bailing_hybrid": Row(
        "BailingHybrid",
        CAUSAL,
        {
            "DeltaAttention": "q_proj k_proj v_proj b_proj g_proj",
            "MLP": GATE_UP,
            "Attention": "q_proj kv_a_proj_with_mqa g_proj",
        },
        mixins={"DeltaAttention": "ByDocument"},
        since="5.23",
    ),
    "bamba": Row("Bamba", CAUSAL, {"MLP": GATE_UP, "Attention": QKV}, lacks(CACHED), mixins={"Mixer": "ByDocument"}),
    "falcon_h1": Row(
        "FalconH1",
        CAUSAL,
        {"Attention": QKV, "MLP": "up_proj gate_proj"},
        mixins={"Mixer": "ByDocument"},
        ignored=("time_step_floor", "time_step_max", "time_step_min"),  # how its mixers were once drawn
    ),
    "falcon_mamba": Row("FalconMamba", CAUSAL, mixins={"Mixer": "ByDocument"}),
    "granitemoehybrid": Row(
        "GraniteMoeHybrid", CAUSAL, {"Attention": QKV}, mixins={"MambaLayer": "ByDocument"}, since="5.13"
    ),
    "inkling": Row(
        "Inkling",
        CAUSAL,
        {"Attention": "q_proj k_proj v_proj r_proj"},
        lacks("tensor parallelism"),
        mixins={"ShortConvolution": "ByDocument"},
        since="5.14",
    ),
    "jamba": Row("Jamba", CAUSAL_AND_SEQUENCE, {"MLP": GATE_UP, "Attention": QKV}, mixins={"MambaMixer": "ByDocument"}),
    "kimi_linear": Row(
        "KimiLinear",
        CAUSAL,
        {
            "DeltaAttention": "q_proj k_proj v_proj b_proj g_a_proj",
            "MLP": GATE_UP,
            "Attention": "q_proj kv_a_proj_with_mqa",
        },
        mixins={"DeltaAttention": "ByDocument"},
        since="5.18",
    ),
    "lara_mini": Row(
        "LaraMini",
        CAUSAL,
        {"GatedDeltaNet": DELTA_NET, "MLP": GATE_UP, "Attention": QKV},
        mixins={"GatedDeltaNet": "ByDocument"},
        since="5.24",
    ),
    "lfm2": Row(
        "Lfm2",
        CAUSAL,
        {"Attention": QKV, "MLP": "w1 w3"},
        mixins={"ShortConv": "ByDocument"},
        tiny={"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},  # by default all are attention
    ),
    "lfm2_moe": Row("Lfm2Moe", CAUSAL, {"MLP": "w1 w3", "Attention": QKV}, mixins={"ShortConv": "ByDocument"}),
    "lfm3": Row(
        "Lfm3",
        CAUSAL,
        {"MLP": "w1 w3", "Attention": "q_proj k_proj v_proj g_proj"},
        mixins={"ShortConv": "ByDocument"},
        since="5.23",
    ),
    "mamba": Row("Mamba", CAUSAL, mixins={"Mixer": "ByDocument"}),
    "mamba2": Row("Mamba2", CAUSAL, mixins={"Mixer": "ByDocument"}),
    "minimax": Row(
        "MiniMax",
        ALL_HEADS,
        {"Attention": "attention_qkv: q_proj k_proj v_proj", "LightningAttention": "qkv_proj output_gate"},
        mixins={"LightningAttention": "ByDocument"},
    ),
    "olmo_hybrid": Row(
        "OlmoHybrid",
        CAUSAL,
        {"GatedDeltaNet": "q_proj k_proj v_proj b_proj a_proj g_proj", "MLP": GATE_UP, "Attention": QKV},
        mixins={"GatedDeltaNet": "ByDocument"},
    ),
    "qwen3_next": Row(
        "Qwen3Next",
        ALL_HEADS,
        {"GatedDeltaNet": "in_proj_qkvz in_proj_ba", "MLP": GATE_UP, "Attention": QKV},
        mixins={"GatedDeltaNet": "ByDocument"},
        mtp_form=MTPForm.PREFIXED,
    ),
    "recurrent_gemma": Row(
        "RecurrentGemma",
        CAUSAL,
        {"RecurrentBlock": "linear_y linear_x", "Mlp": GATE_UP, "Attention": QKV},
        lacks(LEFT, CACHED),
        {"RecurrentBlock": "ByDocument"},
        since="5.13",
    ),
    "xlstm": Row(
        "xLSTM",
        CAUSAL,
        {"FeedForward": "proj_up_gate proj_up"},
        lacks(LEFT),
        {"Layer": "ByDocument"},
    ),
    "zamba": Row(
        "Zamba",
        CAUSAL,
        {"Attention": QKV, "MLP": GATE_UP},
        mixins={"MambaMixer": "ByDocument"},
        since="5.15",  # before, it runs with CUDA kernels only, unless its configuration switches them off
    ),
    "zamba2": Row(
        "Zamba2",
        CAUSAL,
        {"Attention": QKV},
        lacks(CACHED),
        {"MambaMixer": "ByDocument"},
        limited_since={CACHED: "5.15"},
    ),
}
