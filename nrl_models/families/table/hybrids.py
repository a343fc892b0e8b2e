"""Decoders with layers that keep a state: state-space models, gated delta nets, recurrences, convolutions."""

from nrl_models.common.flags import MTPForm
from nrl_models.families.limits import CACHED, COUNTS_COLUMNS, LEFT, lacks
from nrl_models.families.table.row import DELTA_NET, GATE_UP, QKV, Row

ROWS: dict[str, Row] = {
    "bailing_hybrid": Row(
        "BailingHybridForCausalLM",
        {
            "BailingHybridDeltaAttention": "q_proj k_proj v_proj b_proj g_proj",
            "BailingHybridMLP": GATE_UP,
            "BailingHybridAttention": "q_proj kv_a_proj_with_mqa g_proj",
        },
        mixins={"BailingHybridDeltaAttention": "ByDocument"},
        since="5.23",
    ),
    "bamba": Row(
        "BambaForCausalLM",
        {"BambaMLP": GATE_UP, "BambaAttention": QKV},
        lacks(CACHED),
        mixins={"BambaMixer": "ByDocument"},
    ),
    "falcon_h1": Row(
        "FalconH1ForCausalLM",
        {"FalconH1Attention": QKV, "FalconH1MLP": "up_proj gate_proj"},
        mixins={"FalconH1Mixer": "ByDocument"},
        ignored=("time_step_floor", "time_step_max", "time_step_min"),  # how its mixers were once drawn
    ),
    "falcon_mamba": Row("FalconMambaForCausalLM", mixins={"FalconMambaMixer": "ByDocument"}),
    "granitemoehybrid": Row(
        "GraniteMoeHybridForCausalLM",
        {"GraniteMoeHybridAttention": QKV},
        mixins={"GraniteMoeHybridMambaLayer": "ByDocument"},
        since="5.13",
    ),
    "inkling": Row(
        "InklingForCausalLM",
        {"InklingAttention": "q_proj k_proj v_proj r_proj"},
        lacks("tensor parallelism") | COUNTS_COLUMNS,
        mixins={"InklingShortConvolution": "ByDocument"},
        since="5.14",
    ),
    "jamba": Row(
        "JambaForCausalLM JambaForSequenceClassification",
        {"JambaMLP": GATE_UP, "JambaAttention": QKV},
        mixins={"JambaMambaMixer": "ByDocument"},
    ),
    "kimi_linear": Row(
        "KimiLinearForCausalLM",
        {
            "KimiLinearDeltaAttention": "q_proj k_proj v_proj b_proj g_a_proj",
            "KimiLinearMLP": GATE_UP,
            "KimiLinearAttention": "q_proj kv_a_proj_with_mqa",
        },
        mixins={"KimiLinearDeltaAttention": "ByDocument"},
        since="5.18",
    ),
    "lara_mini": Row(
        "LaraMiniForCausalLM",
        {"LaraMiniGatedDeltaNet": DELTA_NET, "LaraMiniMLP": GATE_UP, "LaraMiniAttention": QKV},
        mixins={"LaraMiniGatedDeltaNet": "ByDocument"},
        since="5.24",
    ),
    "lfm2": Row(
        "Lfm2ForCausalLM",
        {"Lfm2Attention": QKV, "Lfm2MLP": "w1 w3"},
        mixins={"Lfm2ShortConv": "ByDocument"},
        tiny={"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},  # by default all are attention
    ),
    "lfm2_moe": Row(
        "Lfm2MoeForCausalLM",
        {"Lfm2MoeMLP": "w1 w3", "Lfm2MoeAttention": QKV},
        mixins={"Lfm2MoeShortConv": "ByDocument"},
    ),
    "lfm3": Row(
        "Lfm3ForCausalLM",
        {"Lfm3MLP": "w1 w3", "Lfm3Attention": "q_proj k_proj v_proj g_proj"},
        mixins={"Lfm3ShortConv": "ByDocument"},
        since="5.23",
    ),
    "mamba": Row("MambaForCausalLM", mixins={"MambaMixer": "ByDocument"}),
    "mamba2": Row("Mamba2ForCausalLM", mixins={"Mamba2Mixer": "ByDocument"}),
    "minimax": Row(
        "MiniMaxForCausalLM MiniMaxForSequenceClassification MiniMaxForTokenClassification",
        {
            "MiniMaxAttention": "attention_qkv: q_proj k_proj v_proj",
            "MiniMaxLightningAttention": "qkv_proj output_gate",
        },
        mixins={"MiniMaxLightningAttention": "ByDocument"},
    ),
    "olmo_hybrid": Row(
        "OlmoHybridForCausalLM",
        {
            "OlmoHybridGatedDeltaNet": "q_proj k_proj v_proj b_proj a_proj g_proj",
            "OlmoHybridMLP": GATE_UP,
            "OlmoHybridAttention": QKV,
        },
        mixins={"OlmoHybridGatedDeltaNet": "ByDocument"},
        part_sizes={
            "olmo_hybrid: linear_attn.conv1d.weight": lambda config: (
                *[config.linear_num_key_heads * config.linear_key_head_dim] * 2,
                None,
            )
        },
    ),
    "qwen3_next": Row(
        "Qwen3NextForCausalLM Qwen3NextForSequenceClassification Qwen3NextForTokenClassification",
        {"Qwen3NextGatedDeltaNet": "in_proj_qkvz in_proj_ba", "Qwen3NextMLP": GATE_UP, "Qwen3NextAttention": QKV},
        mixins={"Qwen3NextGatedDeltaNet": "ByDocument"},
        mtp_form=MTPForm.PREFIXED,
    ),
    "recurrent_gemma": Row(
        "RecurrentGemmaForCausalLM",
        {
            "RecurrentGemmaRecurrentBlock": "linear_y linear_x",
            "RecurrentGemmaMlp": GATE_UP,
            "RecurrentGemmaAttention": QKV,
        },
        lacks(LEFT, CACHED),
        {"RecurrentGemmaRecurrentBlock": "ByDocument"},
        since="5.13",
    ),
    "xlstm": Row(
        "xLSTMForCausalLM",
        {"xLSTMFeedForward": "proj_up_gate proj_up"},
        lacks(LEFT),
        {"xLSTMLayer": "ByDocument"},
    ),
    "zamba": Row(
        "ZambaForCausalLM",
        {"ZambaAttention": QKV, "ZambaMLP": GATE_UP},
        mixins={"ZambaMambaMixer": "ByDocument"},
        since="5.15",  # before, it runs with CUDA kernels only, unless its configuration switches them off
    ),
    "zamba2": Row(
        "Zamba2ForCausalLM",
        {"Zamba2Attention": QKV},
        mixins={"Zamba2MambaMixer": "ByDocument"},
        tiny={"num_key_value_heads": 8},  # one for each head of the queries, as published
    ),
}
