"""Models that accept images or video."""

from nrl_models.common.flags import MTPForm
from nrl_models.families.limits import CACHED, LEFT, NEEDS_IMAGES, OTHER_MASKS, READS_APART, RIGHT, lacks
from nrl_models.families.published import decoder_sizes
from nrl_models.families.table.row import DELTA_NET, GATE_UP, QFORMER, QKV, Row

ROWS: dict[str, Row] = {
    "apertus1p5": Row(
        "Apertus1p5TextForCausalLM Apertus1p5ForConditionalGeneration",
        {"Apertus1p5TextAttention": QKV},
        # The activation has parameters, which see a rank's share of the features. Each class has other names.
        tensor_parallel={
            "model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce",
            "model.language_model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce",
        },
        since="5.24",
    ),
    "aya_vision": Row("AyaVisionForConditionalGeneration"),
    "blip": Row(
        "BlipForConditionalGeneration",
        {"modeling_blip_text.BlipTextSelfAttention": "query key value @ attention, key value @ crossattention"},
        NEEDS_IMAGES,
        since="5.6",
    ),
    "blip_2": Row("Blip2ForConditionalGeneration", {"Blip2QFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES),
    "chameleon": Row("ChameleonForConditionalGeneration", {"ChameleonAttention": QKV, "ChameleonMLP": GATE_UP}),
    "cohere2_vision": Row("Cohere2VisionForConditionalGeneration"),
    "cohere_compass": Row(
        "CohereCompassForCausalLM CohereCompassForConditionalGeneration",
        {"CohereCompassAttention": QKV, "CohereCompassMLP": GATE_UP},
        mixins={"CohereCompassModel": "FreshPositions"},
        since="5.16",
    ),
    "cosmos3_edge": Row(
        "Cosmos3EdgeForConditionalGeneration",
        {"Cosmos3EdgeVisionAttention": QKV, "Cosmos3EdgeTextAttention": QKV},
        mixins={"Cosmos3EdgeModel": "FreshPositions"},
        since="5.23",
    ),
    "deepseek_vl": Row("DeepseekVLForConditionalGeneration"),
    "deepseek_vl_hybrid": Row("DeepseekVLHybridForConditionalGeneration"),
    "emu3": Row(
        "Emu3ForCausalLM Emu3ForConditionalGeneration",
        {"Emu3Attention": QKV, "Emu3MLP": GATE_UP, "Emu3VQVAEAttentionBlock": QKV},
        since={"Emu3ForCausalLM": "5.6", "Emu3ForConditionalGeneration": "5.16"},  # before, its head ignores images
    ),
    "evolla": Row("EvollaForProteinText2Text", {"EvollaAttention": QKV, "EvollaMLP": GATE_UP}, since="5.6"),
    "exaone4_5": Row("Exaone4_5_ForConditionalGeneration", {"Exaone4_5_MLP": GATE_UP}, since="5.8"),
    "florence2": Row("Florence2ForConditionalGeneration", {}, READS_APART),
    "fuyu": Row("FuyuForCausalLM"),
    "git": Row(
        "GitForCausalLM", {"GitVisionAttention": QKV, "GitSelfAttention": "query key value"}, OTHER_MASKS, since="5.23"
    ),
    "glm46v": Row("Glm46VForConditionalGeneration", mixins={"Glm46VModel": "FreshPositions"}),
    "glm4v": Row(
        "Glm4vForConditionalGeneration",
        {"Glm4VisionMlp": GATE_UP, "Glm4vVisionPatchMerger": GATE_UP, "Glm4vTextAttention": QKV},
        mixins={"Glm4vModel": "FreshPositions", "Glm4vTextModel": "PackedTextPositions"},
    ),
    "granite4_vision": Row(
        "Granite4VisionForConditionalGeneration",
        {"Granite4VisionTextAttention": QKV, "Granite4VisionTextMLP": GATE_UP},
        lacks(CACHED),
        since="5.23",
    ),
    "hunyuan_vl": Row(
        "HunYuanVLForConditionalGeneration",
        {"HunYuanVLVisionAttention": QKV, "HunYuanVLDenseV1Attention": QKV, "HunYuanVLMLP": GATE_UP},
        lacks("batch order"),
        since="5.13",
    ),
    "hyperclovax_vision_v2": Row("HyperCLOVAXVisionV2ForConditionalGeneration", since="5.18"),
    "idefics": Row(
        "IdeficsForVisionText2Text",
        {
            "vision.IdeficsVisionAttention": QKV,
            "IdeficsAttention": "k_proj v_proj @ cross_attn, q_proj k_proj v_proj @ self_attn",
            "IdeficsMLP": GATE_UP,
        },
        NEEDS_IMAGES,
    ),
    "idefics2": Row(
        "Idefics2ForConditionalGeneration",
        {"Idefics2VisionAttention": QKV, "Idefics2MLP": GATE_UP, "Idefics2PerceiverAttention": "k_proj v_proj"},
    ),
    "idefics3": Row("Idefics3ForConditionalGeneration", {"Idefics3VisionAttention": QKV}),
    "instructblip": Row(
        "InstructBlipForConditionalGeneration", {"InstructBlipQFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES
    ),
    "instructblipvideo": Row(
        "InstructBlipVideoForConditionalGeneration",
        {"InstructBlipVideoQFormerMultiHeadAttention": QFORMER},
        NEEDS_IMAGES,
    ),
    "internvl": Row("InternVLForConditionalGeneration", {"InternVLVisionAttention": QKV}),
    "janus": Row("JanusForConditionalGeneration", {"JanusVisionAttention": QKV}),
    "kosmos2": Row(
        "Kosmos2ForConditionalGeneration",
        {
            "Kosmos2VisionAttention": QKV,
            "KosmosTextAttention": "k_proj v_proj @ x_attn, q_proj k_proj v_proj @ self_attn",
        },
        NEEDS_IMAGES,
        since="5.6",
    ),
    "lfm2_vl": Row(
        "Lfm2VlForConditionalGeneration",
        tiny={"text_config": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}},
    ),
    "lfm3_vl": Row(
        "Lfm3VlForConditionalGeneration", {"Lfm3VlVisionMLP": "w1 w3", "Lfm3VlVisionAttention": QKV}, since="5.23"
    ),
    "llava": Row("LlavaForConditionalGeneration"),
    "llava_next": Row("LlavaNextForConditionalGeneration"),
    "llava_next_video": Row("LlavaNextVideoForConditionalGeneration"),
    "llava_onevision": Row("LlavaOnevisionForConditionalGeneration"),
    "minicpmv4_6": Row("MiniCPMV4_6ForConditionalGeneration", {"MiniCPMV4_6VisionAttention": QKV}, since="5.7"),
    "minicpmv4_7": Row(
        "MiniCPMV4_7ForConditionalGeneration",
        {"MiniCPMV4_7VisionAttention": QKV},
        mixins={"MiniCPMV4_7Model": "FreshPositions"},
        since="5.18",
    ),
    "mistral3": Row(
        "Mistral3ForConditionalGeneration",
        published={
            "Mistral-Small-3.1-24B": {
                "text_config": decoder_sizes(131072, 5120, 32768, 40, 32, 8, head_dim=128, model_type="mistral"),
                "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096}
                | {"num_hidden_layers": 24, "num_attention_heads": 16},
            }
        },
    ),
    "mllama": Row(
        "MllamaForConditionalGeneration",
        {
            "MllamaTextSelfAttention": QKV,
            "MllamaTextMLP": GATE_UP,
            "MllamaVisionAttention": QKV,
            "MllamaTextCrossAttention": "k_proj v_proj",
        },
    ),
    "molmo2": Row(
        "Molmo2ForConditionalGeneration",
        {
            "Molmo2VisionAttention": "q_proj k_proj v_proj @ self_attn, k_proj v_proj @ image_pooling_2d",
            "Molmo2ImageProjectorMLP": GATE_UP,
            "Molmo2Attention": QKV,
            "Molmo2MLP": "up_proj gate_proj",
        },
        repairs={"Molmo2ForConditionalGeneration": "token types required"},
        part_sizes={"Molmo2TextModel: embed_tokens.weight": lambda config: (None, config.additional_vocab_size)},
        since="5.23",
    ),
    "muse_glimmer": Row(
        "MuseGlimmerForConditionalGeneration",
        {
            "MuseGlimmerVisionAttention": QKV,
            "MuseGlimmerTextAttention": "q_proj k_proj v_proj gate_proj",
            "MuseGlimmerTextMLP": GATE_UP,
        },
        since="5.15",
    ),
    "ovis2": Row("Ovis2ForConditionalGeneration", {"Ovis2VisionAttention": QKV, "Ovis2MLP": GATE_UP}),
    "paligemma": Row(
        "PaliGemmaForConditionalGeneration",
        {},
        lacks(LEFT, RIGHT, CACHED),
        mixins={"PaliGemmaModel": "DecoderByDocument"},
        ignored=("num_image_tokens",),  # set on the text model's part, which has no images
        since="5.10",
    ),
    "qwen3_5": Row(
        "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5ForSequenceClassification "
        "Qwen3_5ForTokenClassification Qwen3_5TextForSequenceClassification",
        {"Qwen3_5GatedDeltaNet": DELTA_NET, "Qwen3_5Attention": QKV, "Qwen3_5MLP": GATE_UP},
        mixins={"Qwen3_5Model": "FreshPositions", "Qwen3_5GatedDeltaNet": "ByDocument"},
        config_values={"attn_output_gate": (True,)},
        mtp_form=MTPForm.PREFIXED,
        # Up to 5.5.1, transformers saved classes with images under a prefix three times.
        since=dict.fromkeys(("Qwen3_5ForTokenClassification", "Qwen3_5TextForSequenceClassification"), "5.9")
        | {"Qwen3_5ForConditionalGeneration": "5.5.2"},
    ),
    "qwen3_vl": Row(
        "Qwen3VLForConditionalGeneration",
        {"Qwen3VLTextAttention": QKV, "Qwen3VLTextMLP": GATE_UP},
        mixins={"Qwen3VLModel": "FreshPositions"},
    ),
    "smolvlm": Row("SmolVLMForConditionalGeneration", {"SmolVLMVisionAttention": QKV}),
    "video_llama_3": Row("VideoLlama3ForConditionalGeneration", {"VideoLlama3VisionAttention": QKV}),
    "video_llava": Row("VideoLlavaForConditionalGeneration", since="5.23"),
    "vipllava": Row("VipLlavaForConditionalGeneration", since="5.23"),
}
