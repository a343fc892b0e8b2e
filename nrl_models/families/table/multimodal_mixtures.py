"""Mixtures of experts that accept images or video."""

from nrl_models.common.flags import MTPForm
from nrl_models.families.limits import CACHED, CHOOSES_KEYS, COUNTS_COLUMNS, LEFT, lacks
from nrl_models.families.published import DEEPSEEK_ROUTING, decoder_sizes
from nrl_models.families.table.row import DELTA_NET, GATE_UP, LATENTS, QKV, Row

ROWS: dict[str, Row] = {
    "aria": Row(
        "AriaForConditionalGeneration AriaTextForCausalLM",
        {"AriaCrossAttention": "k_proj v_proj", "AriaTextAttention": QKV, "AriaSharedExpertsMLP": GATE_UP},
    ),
    "dots3_note": Row(
        "Dots3NoteForCausalLM Dots3NoteForConditionalGeneration",
        {
            "Dots3NoteTextAttention": "q_a_proj kv_a_proj_with_mqa g_proj",
            "Dots3NoteTextIndexer": "wk weights_proj",
            "Dots3NoteTextMLP": GATE_UP,
            "Dots3NoteVisionMLP": GATE_UP,
        },
        lacks("Dots3NoteForCausalLM: cached decoding") | CHOOSES_KEYS,
        since="5.23",
    ),
    "ernie4_5_vl_moe": Row(
        "Ernie4_5_VLMoeForConditionalGeneration",
        {"Ernie4_5_VLMoeTextAttention": QKV, "Ernie4_5_VLMoeMLP": GATE_UP},
        mixins={"Ernie4_5_VLMoeModel": "FreshPositions"},
    ),
    "glm4v_moe": Row(
        "Glm4vMoeForConditionalGeneration",
        {
            "Glm4vMoeisionMlp": GATE_UP,
            "Glm4vMoeVisionPatchMerger": GATE_UP,
            "Glm4vMoeTextAttention": QKV,
            "Glm4vMoeTextMLP": GATE_UP,
        },
        mixins={"Glm4vMoeModel": "FreshPositions", "Glm4vMoeTextModel": "PackedTextPositions"},
    ),
    "glm5_next": Row(
        "Glm5NextForConditionalGeneration",
        {
            "Glm5NextVisionMLP": GATE_UP,
            "Glm5NextVisionPatchMerger": GATE_UP,
            "Glm5NextTextLinearAttention": "q_proj k_proj v_proj b_proj g_a_proj",
            "Glm5NextTextMLP": GATE_UP,
            "Glm5NextTextAttention": LATENTS,
            "Glm5NextTextIndexer": "wk weights_proj",
        },
        lacks("tensor parallelism"),
        mixins={"Glm5NextTextLinearAttention": "ByDocument", "Glm5NextTextAttention": "ByDocument"},
        since="5.16",
    ),
    "hy_v4_vl": Row(
        "HYV4VLForConditionalGeneration",
        {
            "HYV4VLVisionAttention": QKV,
            "HYV4VLAttention": "gate_proj q_a_proj kv_a_proj_with_mqa",
            "HYV4VLMLP": GATE_UP,
        },
        CHOOSES_KEYS,
        mixins={"HYV4VLModel": "FreshPositions"},
        since="5.24",
    ),
    "inkling2": Row(
        "Inkling2ForCausalLM Inkling2ForConditionalGeneration",
        {
            "Inkling2SlidingAttention": "q_proj k_proj v_proj r_proj gate_proj sink_proj",
            "Inkling2FullAttention": "q_proj r_proj gate_proj sink_proj",
            "Inkling2VisionAttention": QKV,
        },
        lacks("tensor parallelism") | COUNTS_COLUMNS,
        mixins=dict.fromkeys(("Inkling2ShortConvolution", "Inkling2DynamicShortConvolution"), "ByDocument"),
        since="5.23",
    ),
    "inkling2_loop": Row(
        "Inkling2LoopForCausalLM Inkling2LoopForConditionalGeneration",
        {
            "Inkling2LoopSlidingAttention": "q_proj k_proj v_proj r_proj gate_proj sink_proj",
            "Inkling2LoopFullAttention": "q_proj r_proj gate_proj sink_proj",
            "Inkling2LoopMessageGate": "forget_gate_proj message_gate_proj",
        },
        lacks("tensor parallelism")
        | COUNTS_COLUMNS
        | {"router replay": "a layer in the loop chooses experts several times for each token"},
        mixins=dict.fromkeys(("Inkling2LoopShortConvolution", "Inkling2LoopDynamicShortConvolution"), "ByDocument"),
        since="5.24",
    ),
    "kimi_k25": Row(
        "Kimi_K25ForConditionalGeneration",
        {"Kimi_K25VisionAttention": QKV},
        # Names in its checkpoints and in trainers.
        aliases={
            "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
            "KimiK25VLForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
        },
        config_values=DEEPSEEK_ROUTING,
        published={
            "Kimi-K2.5 (1T)": {
                "text_config": decoder_sizes(163840, 7168, 18432, 61, 64, 64, model_type="deepseek_v3")
                | {"moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1}
                | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
                | {"q_lora_rank": 1536, "kv_lora_rank": 512}
            }
        },
        since="5.13",
    ),
    "llama4": Row(
        "Llama4ForCausalLM Llama4ForConditionalGeneration",
        {"Llama4TextAttention": QKV, "Llama4TextMLP": GATE_UP, "Llama4VisionAttention": QKV},
        lacks(LEFT, "tensor parallelism"),
        mixins={"Llama4TextAttention": "ByDocument"},
        repairs={"Llama4ForConditionalGeneration": "image outputs"},
    ),
    "minimax_m3_vl": Row(
        "MiniMaxM3SparseForConditionalGeneration MiniMaxM3VLForCausalLM",
        {"MiniMaxM3VLVisionAttention": QKV, "MiniMaxM3VLAttention": QKV},
        since="5.12",
    ),
    "mistral_large4": Row(
        "MistralLarge4ForConditionalGeneration",
        {
            "MistralLarge4TextAttention": "q_proj kv_a_proj_with_mqa",
            "MistralLarge4TextIndexer": "wk weights_proj",
            "MistralLarge4TextMLP": GATE_UP,
        },
        lacks(CACHED) | CHOOSES_KEYS,
        since="5.23",
    ),
    "muse_spark": Row(
        "MuseSparkForConditionalGeneration",
        {"MuseSparkVisionAttention": QKV, "MuseSparkTextAttention": "q_proj k_proj v_proj gate_proj"},
        # With the default, all tokens of the tiny model choose the same experts.
        tiny={"text_config": {"output_multiplier": 1.0}},
        since="5.23",
    ),
    "qwen3_5_moe": Row(
        "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration",
        {"Qwen3_5MoeGatedDeltaNet": DELTA_NET, "Qwen3_5MoeAttention": QKV, "Qwen3_5MoeMLP": GATE_UP},
        mixins={"Qwen3_5MoeModel": "FreshPositions", "Qwen3_5MoeGatedDeltaNet": "ByDocument"},
        config_values={"attn_output_gate": (True,)},
        mtp_form=MTPForm.PREFIXED,
        since={"Qwen3_5MoeForConditionalGeneration": "5.5.2"},
    ),
    "qwen3_vl_moe": Row(
        "Qwen3VLMoeForConditionalGeneration",
        {"Qwen3VLMoeTextAttention": QKV},
        lacks("tensor parallelism"),
        mixins={"Qwen3VLMoeModel": "FreshPositions"},
        config_values={"norm_topk_prob": (True,)},
    ),
    "qwen4_exp": Row(
        "Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration",
        {
            "Qwen4ExpTextGatedResidual": "input_mix_weight_down block_inject_weight",
            "Qwen4ExpTextGatedDeltaNet": "in_proj_qkv in_proj_z in_proj_b in_proj_a",
            "Qwen4ExpTextMLP": GATE_UP,
            "Qwen4ExpTextAttention": QKV,
        },
        mixins={"Qwen4ExpModel": "FreshPositions", "Qwen4ExpTextGatedDeltaNet": "ByDocument"},
        since="5.16",
    ),
    "step3p7": Row(
        "Step3p7ForConditionalGeneration",
        {"Step3p7VisionAttention": QKV, "Step3p7Attention": "q_proj k_proj v_proj g_proj", "Step3p7MLP": GATE_UP},
        since="5.16",
    ),
}
