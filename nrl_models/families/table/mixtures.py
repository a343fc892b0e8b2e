"""Mixtures of experts, text only."""

from nrl_models.common.flags import MTPForm
from nrl_models.families.limits import CACHED, CHOOSES_KEYS, LEFT, lacks
from nrl_models.families.published import DEEPSEEK_ROUTING, decoder_sizes
from nrl_models.families.table.row import GATE_UP, LATENTS, QKV, Row

ROWS: dict[str, Row] = {
    "afmoe": Row(
        "AfmoeForCausalLM",
        {"AfmoeAttention": "q_proj k_proj v_proj gate_proj", "AfmoeMLP": GATE_UP},
        config_values={"score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,), "topk_group": (1,)},
    ),
    "axk1": Row(
        "AXK1ForCausalLM AXK1ForSequenceClassification AXK1ForTokenClassification",
        {"AXK1Attention": LATENTS, "AXK1MLP": GATE_UP},
        config_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        since="5.15",
    ),
    "axk2": Row(
        "AXK2ForCausalLM AXK2ForSequenceClassification AXK2ForTokenClassification",
        {"AXK2Attention": LATENTS, "AXK2Indexer": "wk weights_proj", "AXK2MLP": GATE_UP},
        lacks(CACHED) | CHOOSES_KEYS,
        since="5.18",
    ),
    "beam": Row(
        "BeamForCausalLM", {"BeamAttention": "q_proj k_proj v_proj gate_proj", "BeamMLP": GATE_UP}, since="5.23"
    ),
    "cohere2_moe": Row("Cohere2MoeForCausalLM", {"Cohere2MoeAttention": QKV}, since="5.9"),
    "deepseek_v2": Row(
        "DeepseekV2ForCausalLM DeepseekV2ForSequenceClassification",
        {"DeepseekV2Attention": LATENTS, "DeepseekV2MLP": GATE_UP},
        config_values={"scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    ),
    "deepseek_v32": Row(
        "DeepseekV32ForCausalLM",
        {"DeepseekV32Attention": LATENTS, "DeepseekV32Indexer": "wk weights_proj", "DeepseekV32MLP": GATE_UP},
        lacks(CACHED) | CHOOSES_KEYS,
        tiny={"n_routed_experts": 4},  # other values give two tokens equal scores in the indexer
        since="5.18",
        config_values=DEEPSEEK_ROUTING,
    ),
    "deepseek_v4": Row(
        "DeepseekV4ForCausalLM",
        {
            "DeepseekV4Attention": "q_a_proj kv_proj",
            "DeepseekV4HCACompressor": "kv_proj gate_proj",
            "DeepseekV4MLP": GATE_UP,
            "DeepseekV4CSACompressor": "kv_proj gate_proj",
            "DeepseekV4Indexer": "kv_proj gate_proj",
        },
        lacks(LEFT),
        mixins={"DeepseekV4Attention": "ByDocument"},
        tiny={"index_topk": 2},  # of the entries that each compress four tokens
        since="5.23",
        config_values={"topk_method": ("noaux_tc",)},
    ),
    "doge": Row(
        "DogeForCausalLM DogeForSequenceClassification",
        {"DogeAttention": QKV, "DogeMLP": GATE_UP},
        lacks("tensor parallelism"),
        since="5.18",
    ),
    "dots1": Row("Dots1ForCausalLM", {"Dots1Attention": QKV, "Dots1MLP": GATE_UP}),
    "ernie4_5_moe": Row("Ernie4_5_MoeForCausalLM", {"Ernie4_5_MoeAttention": QKV, "Ernie4_5_MoeMLP": GATE_UP}),
    "exaone_moe": Row("ExaoneMoeForCausalLM", {"ExaoneMoeAttention": QKV, "ExaoneMoeMLP": GATE_UP}),
    "flex_olmo": Row("FlexOlmoForCausalLM", {"FlexOlmoAttention": QKV}),
    "flint": Row("FlintForCausalLM", {"FlintAttention": QKV, "FlintMLP": GATE_UP}, since="5.23"),
    "glm4_moe": Row("Glm4MoeForCausalLM", {"Glm4MoeAttention": QKV, "Glm4MoeMLP": GATE_UP}, mtp_form=MTPForm.NUMBERED),
    "glm4_moe_lite": Row(
        "Glm4MoeLiteForCausalLM",
        {"Glm4MoeLiteAttention": LATENTS, "Glm4MoeLiteMLP": GATE_UP},
        config_values={"topk_method": ("noaux_tc",), "first_k_dense_replace": (1,), "moe_layer_freq": (1,)},
        mtp_form=MTPForm.NUMBERED,
    ),
    "glm_moe_dsa": Row(
        "GlmMoeDsaForCausalLM",
        {"GlmMoeDsaAttention": LATENTS, "GlmMoeDsaIndexer": "wk weights_proj", "GlmMoeDsaMLP": GATE_UP},
        lacks(CACHED) | CHOOSES_KEYS,
        since="5.18",
        config_values=DEEPSEEK_ROUTING | {"rope_interleave": (True,), "indexer_rope_interleave": (True,)},
    ),
    "granitemoe": Row("GraniteMoeForCausalLM", {"GraniteMoeAttention": QKV}),
    "granitemoe_swa": Row("GraniteMoeSWAForCausalLM", {"GraniteMoeSWAAttention": QKV}, since="5.15"),
    "granitemoeshared": Row("GraniteMoeSharedForCausalLM", {"GraniteMoeSharedAttention": QKV}),
    "hunyuan_v1_moe": Row("HunYuanMoEV1ForCausalLM", {"HunYuanMoEV1Attention": QKV, "HunYuanMoEV1MLP": GATE_UP}),
    "hy_v3": Row(
        "HYV3ForCausalLM",
        {"HYV3Attention": QKV, "HYV3MLP": GATE_UP},
        config_values={"first_k_dense_replace": (1,), "qk_norm": (True,), "route_norm": (True,)},
        since="5.6",
    ),
    "hy_v4": Row(
        "HYV4ForCausalLM",
        {"HYV4Attention": "gate_proj q_a_proj kv_a_proj_with_mqa", "HYV4MLP": GATE_UP},
        CHOOSES_KEYS,
        since="5.18",
    ),
    "jetmoe": Row("JetMoeForCausalLM", limits=lacks("activation checkpointing")),
    "kolibri1": Row("Kolibri1ForCausalLM", {"Kolibri1Attention": QKV, "Kolibri1MLP": GATE_UP}, since="5.23"),
    "laguna": Row(
        "LagunaForCausalLM", {"LagunaAttention": "q_proj k_proj v_proj g_proj", "LagunaMLP": GATE_UP}, since="5.7"
    ),
    "longcat_flash": Row(
        "LongcatFlashForCausalLM",
        {"LongcatFlashMLA": LATENTS, "LongcatFlashMLP": GATE_UP},
        config_values={
            "attention_method": ("MLA",),
            "mla_scale_q_lora": (True,),
            "mla_scale_kv_lora": (True,),
            "zero_expert_type": ("identity",),
        },
    ),
    "mellum": Row("MellumForCausalLM", {"MellumAttention": QKV}, since="5.10"),
    "mimo_v2_flash": Row(
        "MiMoV2FlashForCausalLM", {"MiMoV2FlashAttention": QKV, "MiMoV2FlashMLP": GATE_UP}, since="5.13"
    ),
    "minimax_m2": Row(
        "MiniMaxM2ForCausalLM",
        {"MiniMaxM2Attention": QKV},
        # Additional heads for later tokens are not part of the model.
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
        "Mistral4ForCausalLM Mistral4ForSequenceClassification Mistral4ForTokenClassification",
        {"Mistral4Attention": "qkv_a_proj: q_a_proj q_proj kv_a_proj_with_mqa", "Mistral4MLP": GATE_UP},
    ),
    "mixtral": Row(
        "MixtralForCausalLM MixtralForSequenceClassification MixtralForTokenClassification",
        {"MixtralAttention": QKV},
        published={"Mixtral-8x22B": decoder_sizes(32768, 6144, 16384, 56, 48, 8)},
    ),
    "olmoe": Row("OlmoeForCausalLM", {"OlmoeAttention": QKV}),
    "phimoe": Row(
        "PhimoeForCausalLM",
        {"PhimoeAttention": QKV},
        {"router replay": "transformers' own model chooses experts by their largest scores, with no `topk` to replay"},
        aliases={"PhiMoEForCausalLM": "PhimoeForCausalLM"},  # as its checkpoints spell it
    ),
    "qwen2_moe": Row(
        "Qwen2MoeForCausalLM Qwen2MoeForSequenceClassification Qwen2MoeForTokenClassification",
        {"Qwen2MoeAttention": QKV, "Qwen2MoeMLP": GATE_UP},
    ),
    "solar_open": Row("SolarOpenForCausalLM", {"SolarOpenAttention": QKV, "SolarOpenMLP": GATE_UP}),
}
