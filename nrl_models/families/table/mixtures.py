"""Mixtures of experts, text only."""

from nrl_models.common.flags import MTPForm
from nrl_models.families.limits import CACHED, LEFT, lacks
from nrl_models.families.published import decoder_sizes
from nrl_models.families.table.row import ALL_HEADS, CAUSAL, CAUSAL_AND_SEQUENCE, GATE_UP, LATENTS, QKV, Row

DEEPSEEK_ROUTING = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
"""What published configurations state of routing like DeepSeek-V3's, the only kind there is."""

ROWS: dict[str, Row] = {
    "afmoe": Row(
        "Afmoe",
        CAUSAL,
        {"Attention": "q_proj k_proj v_proj gate_proj", "MLP": GATE_UP},
        config_values={"score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,), "topk_group": (1,)},
    ),
    "axk1": Row(
        "AXK1",
        ALL_HEADS,
        {"Attention": LATENTS, "MLP": GATE_UP},
        config_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        since="5.15",
    ),
    "axk2": Row(
        "AXK2",
        ALL_HEADS,
        {"Attention": LATENTS, "Indexer": "wk weights_proj", "MLP": GATE_UP},
        lacks(CACHED),
        since="5.18",
    ),
    "beam": Row("Beam", CAUSAL, {"Attention": "q_proj k_proj v_proj gate_proj", "MLP": GATE_UP}, since="5.23"),
    "cohere2_moe": Row("Cohere2Moe", CAUSAL, {"Attention": QKV}, since="5.9"),
    "deepseek_v2": Row(
        "DeepseekV2",
        CAUSAL_AND_SEQUENCE,
        {"Attention": LATENTS, "MLP": GATE_UP},
        config_values={"scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    ),
    "deepseek_v32": Row(
        "DeepseekV32",
        CAUSAL,
        {"Attention": LATENTS, "Indexer": "wk weights_proj", "MLP": GATE_UP},
        lacks(CACHED),
        tiny={"n_routed_experts": 4},  # with others, two words score alike in the indexer
        since="5.18",
        config_values=DEEPSEEK_ROUTING,
    ),
    "deepseek_v4": Row(
        "DeepseekV4",
        CAUSAL,
        {
            "Attention": "q_a_proj kv_proj",
            "HCACompressor": "kv_proj gate_proj",
            "MLP": GATE_UP,
            "CSACompressor": "kv_proj gate_proj",
            "Indexer": "kv_proj gate_proj",
        },
        lacks(LEFT),
        mixins={"Attention": "ByDocument"},
        tiny={"index_topk": 2},  # of what four words are compressed to each
        since="5.23",
        config_values={"topk_method": ("noaux_tc",)},
    ),
    "doge": Row(
        "Doge", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}, lacks("tensor parallelism"), since="5.18"
    ),
    "dots1": Row("Dots1", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "ernie4_5_moe": Row("Ernie4_5_Moe", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "exaone_moe": Row("ExaoneMoe", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "flex_olmo": Row("FlexOlmo", CAUSAL, {"Attention": QKV}),
    "flint": Row("Flint", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, since="5.23"),
    "glm4_moe": Row("Glm4Moe", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, mtp_form=MTPForm.NUMBERED),
    "glm4_moe_lite": Row(
        "Glm4MoeLite",
        CAUSAL,
        {"Attention": LATENTS, "MLP": GATE_UP},
        config_values={"topk_method": ("noaux_tc",), "first_k_dense_replace": (1,), "moe_layer_freq": (1,)},
        mtp_form=MTPForm.NUMBERED,
    ),
    "glm_moe_dsa": Row(
        "GlmMoeDsa",
        CAUSAL,
        {"Attention": LATENTS, "Indexer": "wk weights_proj", "MLP": GATE_UP},
        lacks(CACHED),
        since="5.18",
        config_values=DEEPSEEK_ROUTING | {"rope_interleave": (True,), "indexer_rope_interleave": (True,)},
    ),
    "granitemoe": Row("GraniteMoe", CAUSAL, {"Attention": QKV}),
    "granitemoe_swa": Row("GraniteMoeSWA", CAUSAL, {"Attention": QKV}, since="5.15"),
    "granitemoeshared": Row("GraniteMoeShared", CAUSAL, {"Attention": QKV}),
    "hy_v3": Row(
        "HYV3",
        CAUSAL,
        {"Attention": QKV, "MLP": GATE_UP},
        config_values={"first_k_dense_replace": (1,), "qk_norm": (True,), "route_norm": (True,)},
        since="5.6",
    ),
    "hy_v4": Row("HYV4", CAUSAL, {"Attention": "gate_proj q_a_proj kv_a_proj_with_mqa", "MLP": GATE_UP}, since="5.18"),
    "jetmoe": Row("JetMoe", CAUSAL, limits=lacks("activation checkpointing")),
    "kolibri1": Row("Kolibri1", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, since="5.23"),
    "laguna": Row("Laguna", CAUSAL, {"Attention": "q_proj k_proj v_proj g_proj", "MLP": GATE_UP}, since="5.7"),
    "longcat_flash": Row(
        "LongcatFlash",
        CAUSAL,
        {"MLA": LATENTS, "MLP": GATE_UP},
        config_values={
            "attention_method": ("MLA",),
            "mla_scale_q_lora": (True,),
            "mla_scale_kv_lora": (True,),
            "zero_expert_type": ("identity",),
        },
    ),
    "mellum": Row("Mellum", CAUSAL, {"Attention": QKV}, since="5.10"),
    "mimo_v2_flash": Row("MiMoV2Flash", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, since="5.13"),
    "minimax_m2": Row(
        "MiniMaxM2",
        CAUSAL,
        {"Attention": QKV},
        # Further heads, which predict words after the next, are not part of the model.
        ignored=("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode"),
        config_values={
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "shared_intermediate_size": (0,),
        },
    ),
    "mistral4": Row(
        "Mistral4",
        ALL_HEADS,
        {"Attention": "qkv_a_proj: q_a_proj q_proj kv_a_proj_with_mqa", "MLP": GATE_UP},
    ),
    "mixtral": Row(
        "Mixtral",
        ALL_HEADS,
        {"Attention": QKV},
        published={"Mixtral-8x22B": decoder_sizes(32768, 6144, 16384, 56, 48, 8)},
    ),
    "olmoe": Row("Olmoe", CAUSAL, {"Attention": QKV}),
    "phimoe": Row(
        "Phimoe",
        CAUSAL,
        {"Attention": QKV},
        {"router replay": "transformers' own model chooses experts by their largest scores, with no `topk` to replay"},
        aliases={"PhiMoEForCausalLM": "PhimoeForCausalLM"},  # as its checkpoints spell it
    ),
    "qwen2_moe": Row("Qwen2Moe", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "solar_open": Row("SolarOpen", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
}
