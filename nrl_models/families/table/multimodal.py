"""Models that take images or video, and the towers that others take from their packages."""

from nrl_models.common.flags import MTPForm
from nrl_models.families.limits import (
    CACHED,
    LEFT,
    NEEDS_IMAGES,
    READS_APART,
    RIGHT,
    lacks,
)
from nrl_models.families.published import decoder_sizes
from nrl_models.families.table.row import (
    ALL_HEADS,
    CAUSAL,
    CAUSAL_AND_CONDITIONAL,
    CONDITIONAL,
    DELTA_NET,
    GATE_UP,
    LATENTS,
    QFORMER,
    QKV,
    Row,
)

ROWS: dict[str, Row] = {
    "apertus1p5": Row(
        "Apertus1p5",
        ("TextForCausalLM", "ForConditionalGeneration"),
        {"TextAttention": QKV},
        tensor_parallel={"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
        since="5.24",
    ),
    "aria": Row(
        "Aria",
        ("ForConditionalGeneration", "TextForCausalLM"),
        {"CrossAttention": "k_proj v_proj", "TextAttention": QKV, "SharedExpertsMLP": GATE_UP},
    ),
    "aya_vision": Row("AyaVision", CONDITIONAL),
    "blip": Row(
        "Blip",
        CONDITIONAL,
        {"modeling_blip_text.TextSelfAttention": "query key value @ attention, key value @ crossattention"},
        NEEDS_IMAGES,
        since="5.6",
    ),
    "blip_2": Row("Blip2", CONDITIONAL, {"QFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES),
    "chameleon": Row("Chameleon", CONDITIONAL, {"Attention": QKV, "MLP": GATE_UP}),
    "clip": Row("CLIP", (), {"Attention": QKV}),
    "cohere2_vision": Row("Cohere2Vision", CONDITIONAL),
    "cohere_compass": Row(
        "CohereCompass",
        CAUSAL_AND_CONDITIONAL,
        {"Attention": QKV, "MLP": GATE_UP},
        mixins={"Model": "FreshPositions"},
        since="5.16",
    ),
    "cosmos3_edge": Row(
        "Cosmos3Edge",
        CONDITIONAL,
        {"VisionAttention": QKV, "TextAttention": QKV},
        mixins={"Model": "FreshPositions"},
        since="5.23",
    ),
    "deepseek_ocr2": Row(
        "DeepseekOcr2",
        CONDITIONAL,
        {"VisionAttention": QKV, "VisionMLP": GATE_UP, "TextAttention": QKV, "TextMLP": GATE_UP},
        since="5.10",
    ),
    "deepseek_vl": Row("DeepseekVL", CONDITIONAL),
    "deepseek_vl_hybrid": Row("DeepseekVLHybrid", CONDITIONAL),
    "dots3_note": Row(
        "Dots3Note",
        CAUSAL_AND_CONDITIONAL,
        {
            "TextAttention": "q_a_proj kv_a_proj_with_mqa g_proj",
            "TextIndexer": "wk weights_proj",
            "TextMLP": GATE_UP,
            "VisionMLP": GATE_UP,
        },
        lacks("Dots3NoteForCausalLM: cached decoding"),
        since="5.23",
    ),
    "emu3": Row(
        "Emu3",
        CAUSAL_AND_CONDITIONAL,
        {"Attention": QKV, "MLP": GATE_UP, "VQVAEAttentionBlock": QKV},
        since={"ForCausalLM": "5.6", "ForConditionalGeneration": "5.16"},  # before, its head ignores images
    ),
    "ernie4_5_vl_moe": Row(
        "Ernie4_5_VLMoe",
        CONDITIONAL,
        {"TextAttention": QKV, "MLP": GATE_UP},
        mixins={"Model": "FreshPositions"},
    ),
    "evolla": Row("Evolla", ("ForProteinText2Text",), {"Attention": QKV, "MLP": GATE_UP}, since="5.6"),
    "exaone4_5": Row("Exaone4_5_", CONDITIONAL, {"MLP": GATE_UP}, since="5.8"),
    "florence2": Row("Florence2", CONDITIONAL, {}, READS_APART),
    "fuyu": Row("Fuyu", CAUSAL),
    "gemma4_unified": Row(
        "Gemma4Unified",
        CAUSAL_AND_CONDITIONAL,
        {"TextAttention": QKV, "TextMLP": GATE_UP},
        tiny={"audio_config": {}},
        since="5.10",
    ),
    "git": Row("Git", CAUSAL, {"VisionAttention": QKV, "SelfAttention": "query key value"}, since="5.23"),
    "glm46v": Row("Glm46V", CONDITIONAL, mixins={"Model": "FreshPositions"}),
    "glm4v": Row(
        "",
        ("Glm4vForConditionalGeneration",),
        {"Glm4VisionMlp": GATE_UP, "Glm4vVisionPatchMerger": GATE_UP, "Glm4vTextAttention": QKV},
        mixins={"Glm4vModel": "FreshPositions", "Glm4vTextModel": "PackedTextPositions"},
    ),
    "glm4v_moe": Row(
        "",
        ("Glm4vMoeForConditionalGeneration",),
        {
            "Glm4vMoeisionMlp": GATE_UP,
            "Glm4vMoeVisionPatchMerger": GATE_UP,
            "Glm4vMoeTextAttention": QKV,
            "Glm4vMoeTextMLP": GATE_UP,
        },
        mixins={"Glm4vMoeModel": "FreshPositions", "Glm4vMoeTextModel": "PackedTextPositions"},
    ),
    "glm5_next": Row(
        "Glm5Next",
        CONDITIONAL,
        {
            "VisionMLP": GATE_UP,
            "VisionPatchMerger": GATE_UP,
            "TextLinearAttention": "q_proj k_proj v_proj b_proj g_a_proj",
            "TextMLP": GATE_UP,
            "TextAttention": LATENTS,
            "TextIndexer": "wk weights_proj",
        },
        lacks("tensor parallelism"),
        mixins={"TextLinearAttention": "ByDocument", "TextAttention": "ByDocument"},
        since="5.16",
    ),
    "glm_ocr": Row(
        "GlmOcr",
        CONDITIONAL,
        {"VisionMlp": GATE_UP, "VisionPatchMerger": GATE_UP, "TextAttention": QKV},
        mixins={"Model": "FreshPositions", "TextModel": "PackedTextPositions"},
    ),
    "got_ocr2": Row("GotOcr2", CONDITIONAL),
    "granite4_vision": Row(
        "Granite4Vision", CONDITIONAL, {"TextAttention": QKV, "TextMLP": GATE_UP}, lacks(CACHED), since="5.23"
    ),
    "granite_docling": Row(
        "GraniteDocling", CONDITIONAL, {"VisionAttention": QKV, "TextAttention": QKV, "TextMLP": GATE_UP}, since="5.23"
    ),
    "hunyuan_vl": Row(
        "HunYuanVL",
        CONDITIONAL,
        {"VisionAttention": QKV, "DenseV1Attention": QKV, "MLP": GATE_UP},
        lacks("batch order"),
        since="5.13",
    ),
    "hy_v4_vl": Row(
        "HYV4VL",
        CONDITIONAL,
        {"VisionAttention": QKV, "Attention": "gate_proj q_a_proj kv_a_proj_with_mqa", "MLP": GATE_UP},
        mixins={"Model": "FreshPositions"},
        since="5.24",
    ),
    "hyperclovax_vision_v2": Row("HyperCLOVAXVisionV2", CONDITIONAL, since="5.18"),
    "idefics": Row(
        "Idefics",
        ("ForVisionText2Text",),
        {
            "vision.VisionAttention": QKV,
            "Attention": "k_proj v_proj @ cross_attn, q_proj k_proj v_proj @ self_attn",
            "MLP": GATE_UP,
        },
        NEEDS_IMAGES,
    ),
    "idefics2": Row(
        "Idefics2", CONDITIONAL, {"VisionAttention": QKV, "MLP": GATE_UP, "PerceiverAttention": "k_proj v_proj"}
    ),
    "idefics3": Row("Idefics3", CONDITIONAL, {"VisionAttention": QKV}),
    "inkling2": Row(
        "Inkling2",
        CAUSAL_AND_CONDITIONAL,
        {
            "SlidingAttention": "q_proj k_proj v_proj r_proj gate_proj sink_proj",
            "FullAttention": "q_proj r_proj gate_proj sink_proj",
            "VisionAttention": QKV,
        },
        lacks("tensor parallelism"),
        mixins=dict.fromkeys(("ShortConvolution", "DynamicShortConvolution"), "ByDocument"),
        since="5.23",
    ),
    "instructblip": Row("InstructBlip", CONDITIONAL, {"QFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES),
    "instructblipvideo": Row("InstructBlipVideo", CONDITIONAL, {"QFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES),
    "internvl": Row("InternVL", CONDITIONAL, {"VisionAttention": QKV}),
    "janus": Row("Janus", CONDITIONAL, {"VisionAttention": QKV}),
    "kimi_k25": Row(
        "Kimi_K25",
        CONDITIONAL,
        {"VisionAttention": QKV},
        # What its checkpoints and its trainers name it.
        aliases={
            "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
            "KimiK25VLForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
        },
        config_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
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
    "kosmos2": Row(
        "",
        ("Kosmos2ForConditionalGeneration",),
        {
            "Kosmos2VisionAttention": QKV,
            "KosmosTextAttention": "k_proj v_proj @ x_attn, q_proj k_proj v_proj @ self_attn",
        },
        NEEDS_IMAGES,
        since="5.6",
    ),
    "kosmos2_5": Row(
        "Kosmos2_5",
        CONDITIONAL,
        {
            "VisionAttention": "query key value",
            "VisionMlp": "wi_0 wi_1",
            "TextAttention": "k_proj v_proj @ x_attn, k_proj v_proj q_proj @ self_attn",
        },
        lacks(LEFT, RIGHT),
        mixins={"TextTransformer": "DecoderByDocument"},
        since="5.10",
    ),
    "lfm2_vl": Row(
        "Lfm2Vl",
        CONDITIONAL,
        tiny={"text_config": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}},
    ),
    "lfm3_vl": Row("Lfm3Vl", CONDITIONAL, {"VisionMLP": "w1 w3", "VisionAttention": QKV}, since="5.23"),
    "lighton_ocr": Row("LightOnOcr", CONDITIONAL),
    "llama4": Row(
        "Llama4",
        CAUSAL_AND_CONDITIONAL,
        {"TextAttention": QKV, "TextMLP": GATE_UP, "VisionAttention": QKV},
        lacks(LEFT, "tensor parallelism"),
        mixins={"TextAttention": "ByDocument"},
        repairs={"ForConditionalGeneration": "image outputs"},
    ),
    "llava": Row("Llava", CONDITIONAL),
    "llava_next": Row("LlavaNext", CONDITIONAL),
    "llava_next_video": Row("LlavaNextVideo", CONDITIONAL),
    "llava_onevision": Row("LlavaOnevision", CONDITIONAL),
    "minicpm_ocr": Row("MiniCPMOcr", CONDITIONAL, {"VisionAttention": QKV}, since="5.23"),
    "minicpmv4_6": Row("MiniCPMV4_6", CONDITIONAL, {"VisionAttention": QKV}, since="5.7"),
    "minicpmv4_7": Row(
        "MiniCPMV4_7",
        CONDITIONAL,
        {"VisionAttention": QKV},
        mixins={"Model": "FreshPositions"},
        since="5.18",
    ),
    "minimax_m3_vl": Row(
        "",
        ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"),
        {"MiniMaxM3VLVisionAttention": QKV, "MiniMaxM3VLAttention": QKV},
        since="5.12",
    ),
    "mistral3": Row(
        "Mistral3",
        CONDITIONAL,
        published={
            "Mistral-Small-3.1-24B": {
                "text_config": decoder_sizes(131072, 5120, 32768, 40, 32, 8, head_dim=128, model_type="mistral"),
                "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096}
                | {"num_hidden_layers": 24, "num_attention_heads": 16},
            }
        },
    ),
    "mistral_large4": Row(
        "MistralLarge4",
        CONDITIONAL,
        {"TextAttention": "q_proj kv_a_proj_with_mqa", "TextIndexer": "wk weights_proj", "TextMLP": GATE_UP},
        lacks(CACHED),
        since="5.23",
    ),
    "mllama": Row(
        "Mllama",
        CONDITIONAL,
        {"TextSelfAttention": QKV, "TextMLP": GATE_UP, "VisionAttention": QKV, "TextCrossAttention": "k_proj v_proj"},
    ),
    "molmo2": Row(
        "Molmo2",
        CONDITIONAL,
        {
            "VisionAttention": "q_proj k_proj v_proj @ self_attn, k_proj v_proj @ image_pooling_2d",
            "ImageProjectorMLP": GATE_UP,
            "Attention": QKV,
            "MLP": "up_proj gate_proj",
        },
        since="5.23",
    ),
    "muse_glimmer": Row(
        "MuseGlimmer",
        CONDITIONAL,
        {"VisionAttention": QKV, "TextAttention": "q_proj k_proj v_proj gate_proj", "TextMLP": GATE_UP},
        since="5.15",
    ),
    "muse_spark": Row(
        "MuseSpark",
        CONDITIONAL,
        {"VisionAttention": QKV, "TextAttention": "q_proj k_proj v_proj gate_proj"},
        lacks("router replay"),
        since="5.23",
    ),
    "ovis2": Row("Ovis2", CONDITIONAL, {"VisionAttention": QKV, "MLP": GATE_UP}),
    "paddleocr_vl": Row(
        "PaddleOCR",
        ("VLForConditionalGeneration",),
        {"VisionAttention": QKV, "Attention": QKV, "MLP": GATE_UP},
        mixins={"VLModel": "FreshPositions", "TextModel": "PackedTextPositions"},
    ),
    "paligemma": Row(
        "PaliGemma",
        CONDITIONAL,
        {},
        lacks(LEFT, RIGHT, CACHED),
        mixins={"Model": "DecoderByDocument"},
        ignored=("num_image_tokens",),  # set on the text model's part, which has no images
        since="5.10",
    ),
    "phi4_multimodal": Row("Phi4Multimodal", CAUSAL, {"VisionAttention": QKV}),
    "pix2struct": Row(
        "Pix2Struct",
        CONDITIONAL,
        {
            "VisionAttention": "query key value",
            "VisionMlp": "wi_0 wi_1",
            "TextAttention": "query key value @ self_attention, key value @ encoder_decoder_attention",
            "TextDenseGatedActDense": "wi_0 wi_1",
        },
        lacks("activation checkpointing") | READS_APART,
    ),
    "pixtral": Row("Pixtral", (), {"Attention": QKV, "MLP": GATE_UP}),
    "qianfan_ocr": Row("QianfanOCR", CONDITIONAL, {"VisionAttention": QKV}, since="5.6"),
    "qwen3_5": Row(
        "Qwen3_5",
        (*CAUSAL_AND_CONDITIONAL, *ALL_HEADS[1:], "TextForSequenceClassification"),
        {"GatedDeltaNet": DELTA_NET, "Attention": QKV, "MLP": GATE_UP},
        mixins={"Model": "FreshPositions", "GatedDeltaNet": "ByDocument"},
        config_values={"attn_output_gate": (True,)},
        mtp_form=MTPForm.PREFIXED,
        since={"ForTokenClassification": "5.9", "TextForSequenceClassification": "5.9"},
    ),
    "qwen3_5_moe": Row(
        "Qwen3_5Moe",
        CAUSAL_AND_CONDITIONAL,
        {"GatedDeltaNet": DELTA_NET, "Attention": QKV, "MLP": GATE_UP},
        mixins={"Model": "FreshPositions", "GatedDeltaNet": "ByDocument"},
        config_values={"attn_output_gate": (True,)},
        mtp_form=MTPForm.PREFIXED,
    ),
    "qwen3_vl": Row(
        "Qwen3VL", CONDITIONAL, {"TextAttention": QKV, "TextMLP": GATE_UP}, mixins={"Model": "FreshPositions"}
    ),
    "qwen3_vl_moe": Row(
        "Qwen3VLMoe",
        CONDITIONAL,
        {"TextAttention": QKV},
        lacks("tensor parallelism"),
        mixins={"Model": "FreshPositions"},
        config_values={"norm_topk_prob": (True,)},
    ),
    "qwen4_exp": Row(
        "Qwen4Exp",
        CAUSAL_AND_CONDITIONAL,
        {
            "TextGatedResidual": "input_mix_weight_down block_inject_weight",
            "TextGatedDeltaNet": "in_proj_qkv in_proj_z in_proj_b in_proj_a",
            "TextMLP": GATE_UP,
            "TextAttention": QKV,
        },
        mixins={"Model": "FreshPositions", "TextGatedDeltaNet": "ByDocument"},
        since="5.16",
    ),
    "radio": Row("Radio", (), {"Attention": QKV}, since="5.13"),
    "siglip": Row("Siglip", (), {"Attention": QKV}),
    "siglip2": Row("Siglip2", (), {"Attention": QKV}),
    "smolvlm": Row("SmolVLM", CONDITIONAL, {"VisionAttention": QKV}),
    "step3p7": Row(
        "Step3p7",
        CONDITIONAL,
        {"VisionAttention": QKV, "Attention": "q_proj k_proj v_proj g_proj", "MLP": GATE_UP},
        since="5.16",
    ),
    "unlimited_ocr": Row(
        "UnlimitedOcr", CONDITIONAL, {"Attention": QKV, "TextAttention": QKV, "TextMLP": GATE_UP}, since="5.23"
    ),
    "video_llama_3": Row("VideoLlama3", CONDITIONAL, {"VisionAttention": QKV}),
    "video_llava": Row("VideoLlava", CONDITIONAL, since="5.23"),
    "vipllava": Row("VipLlava", CONDITIONAL, since="5.23"),
    "vit": Row("ViT", (), {"Attention": QKV}),
}
