"""Which linears of which layers read one input, for families that need nothing else said.

A row is a package of transformers (`transformers.models.NAME.modeling_NAME`): the architectures served, and for each
layer class the linears that are combined, a string for a group. The generated tests hold every row against a trace of
the model, so a row that is wrong or lacks a group fails. Importing this imports no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Standard:
    """One package of transformers.

    Args:
        architectures: classes of the package that are served.
        layers: for each layer class of the package its groups, as the names of linears with spaces between.
        tiny: as `FamilyModel.tiny`.
        limits: as `FamilyModel.limits`; what holds for one architecture only stands under `"Architecture: feature"`.
        modeling: the module that has the classes, where it is not called as the package.
    """

    architectures: tuple[str, ...]
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    modeling: str = ""

    def module(self, package: str) -> str:
        """The full name of the module that has the classes."""
        return f"transformers.models.{package}.{self.modeling or f'modeling_{package}'}"

    def limits_of(self, architecture: str) -> dict[str, str]:
        """The limits of one architecture, by feature."""
        found = {}
        for key, reason in self.limits.items():
            name, _, feature = key.rpartition(": ")
            if name in ("", architecture):
                found[feature] = reason
        return found


QKV = ("q_proj k_proj v_proj",)
GATE_UP = ("gate_proj up_proj",)
STANDARD: dict[str, Standard] = {
    "afmoe": Standard(
        ("AfmoeForCausalLM",), {"AfmoeAttention": ("q_proj k_proj v_proj gate_proj",), "AfmoeMLP": GATE_UP}
    ),
    "apertus": Standard(("ApertusForCausalLM", "ApertusForTokenClassification"), {"ApertusAttention": QKV}),
    "arcee": Standard(
        ("ArceeForCausalLM", "ArceeForSequenceClassification", "ArceeForTokenClassification"), {"ArceeAttention": QKV}
    ),
    "aria": Standard(
        ("AriaForConditionalGeneration", "AriaTextForCausalLM"),
        {"AriaCrossAttention": ("k_proj v_proj",), "AriaTextAttention": QKV, "AriaSharedExpertsMLP": GATE_UP},
    ),
    "axk1": Standard(
        ("AXK1ForCausalLM", "AXK1ForSequenceClassification", "AXK1ForTokenClassification"),
        {"AXK1Attention": ("q_a_proj kv_a_proj_with_mqa",), "AXK1MLP": GATE_UP},
    ),
    "axk2": Standard(
        ("AXK2ForCausalLM", "AXK2ForSequenceClassification", "AXK2ForTokenClassification"),
        {"AXK2Attention": ("q_a_proj kv_a_proj_with_mqa",), "AXK2Indexer": ("wk weights_proj",), "AXK2MLP": GATE_UP},
    ),
    "aya_vision": Standard(("AyaVisionForConditionalGeneration",), {}),
    "bailing_hybrid": Standard(
        ("BailingHybridForCausalLM",),
        {
            "BailingHybridDeltaAttention": ("q_proj k_proj v_proj b_proj g_proj",),
            "BailingHybridMLP": GATE_UP,
            "BailingHybridAttention": ("q_proj kv_a_proj_with_mqa g_proj",),
        },
    ),
    "bamba": Standard(("BambaForCausalLM",), {"BambaMLP": GATE_UP, "BambaAttention": QKV}),
    "bart": Standard(("BartForCausalLM",), {"BartAttention": QKV}),
    "beam": Standard(("BeamForCausalLM",), {"BeamAttention": ("q_proj k_proj v_proj gate_proj",), "BeamMLP": GATE_UP}),
    "bert": Standard(
        ("BertLMHeadModel",), {"BertSelfAttention": ("query key value",), "BertCrossAttention": ("key value",)}
    ),
    "bert_generation": Standard(("BertGenerationDecoder",), {"BertGenerationSelfAttention": ("query key value",)}),
    "bigbird_pegasus": Standard(("BigBirdPegasusForCausalLM",), {"BigBirdPegasusDecoderAttention": QKV}),
    "biogpt": Standard(
        ("BioGptForCausalLM", "BioGptForSequenceClassification", "BioGptForTokenClassification"),
        {"BioGptAttention": QKV},
    ),
    "bitnet": Standard(("BitNetForCausalLM",), {"BitNetAttention": QKV, "BitNetMLP": GATE_UP}),
    "blenderbot": Standard(("BlenderbotForCausalLM",), {"BlenderbotAttention": QKV}),
    "blenderbot_small": Standard(("BlenderbotSmallForCausalLM",), {"BlenderbotSmallAttention": QKV}),
    "blip": Standard(
        ("BlipForConditionalGeneration",),
        {"BlipTextSelfAttention": ("query key value",)},
        modeling="modeling_blip_text",
    ),
    "blip_2": Standard(("Blip2ForConditionalGeneration",), {"Blip2QFormerMultiHeadAttention": ("query key value",)}),
    "blt": Standard(
        ("BltForCausalLM",), {"BltSelfAttention": QKV, "BltMLP": GATE_UP, "BltCrossAttention": ("k_proj v_proj",)}
    ),
    "camembert": Standard(("CamembertForCausalLM",), {"CamembertSelfAttention": ("query key value",)}),
    "chameleon": Standard(("ChameleonForConditionalGeneration",), {"ChameleonAttention": QKV, "ChameleonMLP": GATE_UP}),
    "clip": Standard((), {"CLIPAttention": QKV}),
    "cohere": Standard(("CohereForCausalLM",), {"CohereAttention": QKV, "CohereMLP": GATE_UP}),
    "cohere2": Standard(("Cohere2ForCausalLM",), {"Cohere2Attention": QKV, "Cohere2MLP": GATE_UP}),
    "cohere2_moe": Standard(("Cohere2MoeForCausalLM",), {"Cohere2MoeAttention": QKV}),
    "cohere2_vision": Standard(("Cohere2VisionForConditionalGeneration",), {}),
    "cohere_compass": Standard(
        ("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
        {"CohereCompassAttention": QKV, "CohereCompassMLP": GATE_UP},
    ),
    "cosmos3_edge": Standard(
        ("Cosmos3EdgeForConditionalGeneration",), {"Cosmos3EdgeVisionAttention": QKV, "Cosmos3EdgeTextAttention": QKV}
    ),
    "cosmos3_omni": Standard(("Cosmos3OmniForConditionalGeneration",), {}),
    "cpmant": Standard(
        ("CpmAntForCausalLM",),
        {"CpmAntAttention": ("project_q project_k project_v",), "CpmAntDenseGatedACT": ("w_0 w_1",)},
    ),
    "ctrl": Standard(("CTRLLMHeadModel",), {"MultiHeadAttention": ("Wq Wk Wv",)}),
    "cwm": Standard(("CwmForCausalLM",), {"CwmAttention": QKV, "CwmMLP": GATE_UP}),
    "data2vec": Standard(
        ("Data2VecTextForCausalLM",),
        {"Data2VecTextSelfAttention": ("query key value",)},
        modeling="modeling_data2vec_text",
    ),
    "deepseek_ocr2": Standard(
        ("DeepseekOcr2ForConditionalGeneration",),
        {
            "DeepseekOcr2VisionAttention": QKV,
            "DeepseekOcr2VisionMLP": GATE_UP,
            "DeepseekOcr2TextAttention": QKV,
            "DeepseekOcr2TextMLP": GATE_UP,
        },
    ),
    "deepseek_v2": Standard(
        ("DeepseekV2ForCausalLM", "DeepseekV2ForSequenceClassification"),
        {"DeepseekV2Attention": ("q_a_proj kv_a_proj_with_mqa",), "DeepseekV2MLP": GATE_UP},
    ),
    "deepseek_v32": Standard(
        ("DeepseekV32ForCausalLM",),
        {
            "DeepseekV32Attention": ("q_a_proj kv_a_proj_with_mqa",),
            "DeepseekV32Indexer": ("wk weights_proj",),
            "DeepseekV32MLP": GATE_UP,
        },
    ),
    "deepseek_v4": Standard(
        ("DeepseekV4ForCausalLM",),
        {
            "DeepseekV4Attention": ("q_a_proj kv_proj",),
            "DeepseekV4HCACompressor": ("kv_proj gate_proj",),
            "DeepseekV4MLP": GATE_UP,
            "DeepseekV4CSACompressor": ("kv_proj gate_proj",),
            "DeepseekV4Indexer": ("kv_proj gate_proj",),
        },
    ),
    "deepseek_vl": Standard(("DeepseekVLForConditionalGeneration",), {}),
    "deepseek_vl_hybrid": Standard(("DeepseekVLHybridForConditionalGeneration",), {}),
    "diffllama": Standard(
        ("DiffLlamaForCausalLM", "DiffLlamaForSequenceClassification", "DiffLlamaForTokenClassification"),
        {"DiffLlamaAttention": QKV, "DiffLlamaMLP": GATE_UP},
    ),
    "doge": Standard(("DogeForCausalLM", "DogeForSequenceClassification"), {"DogeAttention": QKV, "DogeMLP": GATE_UP}),
    "dots1": Standard(("Dots1ForCausalLM",), {"Dots1Attention": QKV, "Dots1MLP": GATE_UP}),
    "dots3_note": Standard(
        ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
        {
            "Dots3NoteTextAttention": ("q_a_proj kv_a_proj_with_mqa g_proj",),
            "Dots3NoteTextIndexer": ("wk weights_proj",),
            "Dots3NoteTextMLP": GATE_UP,
            "Dots3NoteVisionMLP": GATE_UP,
        },
    ),
    "electra": Standard(("ElectraForCausalLM",), {"ElectraSelfAttention": ("query key value",)}),
    "emu3": Standard(
        ("Emu3ForCausalLM", "Emu3ForConditionalGeneration"),
        {"Emu3Attention": QKV, "Emu3MLP": GATE_UP, "Emu3VQVAEAttentionBlock": QKV},
    ),
    "ernie": Standard(("ErnieForCausalLM",), {"ErnieSelfAttention": ("query key value",)}),
    "ernie4_5": Standard(("Ernie4_5ForCausalLM",), {"Ernie4_5Attention": QKV, "Ernie4_5MLP": GATE_UP}),
    "ernie4_5_moe": Standard(("Ernie4_5_MoeForCausalLM",), {"Ernie4_5_MoeAttention": QKV, "Ernie4_5_MoeMLP": GATE_UP}),
    "ernie4_5_vl_moe": Standard(
        ("Ernie4_5_VLMoeForConditionalGeneration",), {"Ernie4_5_VLMoeTextAttention": QKV, "Ernie4_5_VLMoeMLP": GATE_UP}
    ),
    "evolla": Standard(("EvollaForProteinText2Text",), {"EvollaAttention": QKV, "EvollaMLP": GATE_UP}),
    "exaone4": Standard(
        ("Exaone4ForCausalLM", "Exaone4ForSequenceClassification", "Exaone4ForTokenClassification"),
        {"Exaone4Attention": QKV, "Exaone4MLP": GATE_UP},
    ),
    "exaone4_5": Standard(("Exaone4_5_ForConditionalGeneration",), {"Exaone4_5_MLP": GATE_UP}),
    "exaone_moe": Standard(("ExaoneMoeForCausalLM",), {"ExaoneMoeAttention": QKV, "ExaoneMoeMLP": GATE_UP}),
    "falcon_h1": Standard(("FalconH1ForCausalLM",), {"FalconH1Attention": QKV, "FalconH1MLP": ("up_proj gate_proj",)}),
    "flex_olmo": Standard(("FlexOlmoForCausalLM",), {"FlexOlmoAttention": QKV}),
    "flint": Standard(("FlintForCausalLM",), {"FlintAttention": QKV, "FlintMLP": GATE_UP}),
    "florence2": Standard(("Florence2ForConditionalGeneration",), {}),
    "gemma": Standard(
        ("GemmaForCausalLM", "GemmaForSequenceClassification", "GemmaForTokenClassification"),
        {"GemmaAttention": QKV, "GemmaMLP": GATE_UP},
    ),
    "gemma4_unified": Standard(
        ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        {"Gemma4UnifiedTextAttention": QKV, "Gemma4UnifiedTextMLP": GATE_UP},
    ),
    "git": Standard(("GitForCausalLM",), {"GitVisionAttention": QKV, "GitSelfAttention": ("query key value",)}),
    "glm": Standard(
        ("GlmForCausalLM", "GlmForSequenceClassification", "GlmForTokenClassification"), {"GlmAttention": QKV}
    ),
    "glm4": Standard(
        ("Glm4ForCausalLM", "Glm4ForSequenceClassification", "Glm4ForTokenClassification"), {"Glm4Attention": QKV}
    ),
    "glm46v": Standard(("Glm46VForConditionalGeneration",), {}),
    "glm4_moe": Standard(("Glm4MoeForCausalLM",), {"Glm4MoeAttention": QKV, "Glm4MoeMLP": GATE_UP}),
    "glm4_moe_lite": Standard(
        ("Glm4MoeLiteForCausalLM",),
        {"Glm4MoeLiteAttention": ("q_a_proj kv_a_proj_with_mqa",), "Glm4MoeLiteMLP": GATE_UP},
    ),
    "glm4v": Standard(
        ("Glm4vForConditionalGeneration",),
        {"Glm4VisionMlp": GATE_UP, "Glm4vVisionPatchMerger": GATE_UP, "Glm4vTextAttention": QKV},
    ),
    "glm4v_moe": Standard(
        ("Glm4vMoeForConditionalGeneration",),
        {
            "Glm4vMoeisionMlp": GATE_UP,
            "Glm4vMoeVisionPatchMerger": GATE_UP,
            "Glm4vMoeTextAttention": QKV,
            "Glm4vMoeTextMLP": GATE_UP,
        },
    ),
    "glm5_next": Standard(
        ("Glm5NextForConditionalGeneration",),
        {
            "Glm5NextVisionMLP": GATE_UP,
            "Glm5NextVisionPatchMerger": GATE_UP,
            "Glm5NextTextLinearAttention": ("q_proj k_proj v_proj b_proj g_a_proj",),
            "Glm5NextTextMLP": GATE_UP,
            "Glm5NextTextAttention": ("q_a_proj kv_a_proj_with_mqa",),
            "Glm5NextTextIndexer": ("wk weights_proj",),
        },
    ),
    "glm_moe_dsa": Standard(
        ("GlmMoeDsaForCausalLM",),
        {
            "GlmMoeDsaAttention": ("q_a_proj kv_a_proj_with_mqa",),
            "GlmMoeDsaIndexer": ("wk weights_proj",),
            "GlmMoeDsaMLP": GATE_UP,
        },
    ),
    "glm_ocr": Standard(
        ("GlmOcrForConditionalGeneration",),
        {"GlmOcrVisionMlp": GATE_UP, "GlmOcrVisionPatchMerger": GATE_UP, "GlmOcrTextAttention": QKV},
    ),
    "glmasr": Standard(("GlmAsrForConditionalGeneration",), {}),
    "got_ocr2": Standard(("GotOcr2ForConditionalGeneration",), {}),
    "gpt_neo": Standard(
        ("GPTNeoForCausalLM", "GPTNeoForSequenceClassification", "GPTNeoForTokenClassification"),
        {"GPTNeoSelfAttention": QKV},
    ),
    "gptj": Standard(("GPTJForCausalLM", "GPTJForSequenceClassification"), {"GPTJAttention": QKV}),
    "granite": Standard(("GraniteForCausalLM",), {"GraniteAttention": QKV, "GraniteMLP": GATE_UP}),
    "granite4_vision": Standard(
        ("Granite4VisionForConditionalGeneration",),
        {"Granite4VisionTextAttention": QKV, "Granite4VisionTextMLP": GATE_UP},
    ),
    "granite_docling": Standard(
        ("GraniteDoclingForConditionalGeneration",),
        {"GraniteDoclingVisionAttention": QKV, "GraniteDoclingTextAttention": QKV, "GraniteDoclingTextMLP": GATE_UP},
    ),
    "granite_speech": Standard(("GraniteSpeechForConditionalGeneration",), {}),
    "granite_speech_plus": Standard(("GraniteSpeechPlusForConditionalGeneration",), {}),
    "granite_swa": Standard(("GraniteSWAForCausalLM",), {"GraniteSWAAttention": QKV, "GraniteSWAMLP": GATE_UP}),
    "granitemoe": Standard(("GraniteMoeForCausalLM",), {"GraniteMoeAttention": QKV}),
    "granitemoe_swa": Standard(("GraniteMoeSWAForCausalLM",), {"GraniteMoeSWAAttention": QKV}),
    "granitemoehybrid": Standard(("GraniteMoeHybridForCausalLM",), {"GraniteMoeHybridAttention": QKV}),
    "granitemoeshared": Standard(("GraniteMoeSharedForCausalLM",), {"GraniteMoeSharedAttention": QKV}),
    "helium": Standard(
        ("HeliumForCausalLM", "HeliumForSequenceClassification", "HeliumForTokenClassification"),
        {"HeliumAttention": QKV, "HeliumMLP": GATE_UP},
    ),
    "hrm_text": Standard(
        ("HrmTextForCausalLM",), {"HrmTextAttention": ("q_proj k_proj v_proj gate_proj",), "HrmTextMLP": GATE_UP}
    ),
    "hunyuan_v1_dense": Standard(
        ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification"),
        {"HunYuanDenseV1Attention": QKV, "HunYuanDenseV1MLP": GATE_UP},
    ),
    "hunyuan_v1_moe": Standard(
        ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1ForSequenceClassification"),
        {"HunYuanMoEV1Attention": QKV, "HunYuanMoEV1MLP": GATE_UP},
    ),
    "hunyuan_vl": Standard(
        ("HunYuanVLForConditionalGeneration",),
        {"HunYuanVLVisionAttention": QKV, "HunYuanVLDenseV1Attention": QKV, "HunYuanVLMLP": GATE_UP},
    ),
    "hy_v3": Standard(("HYV3ForCausalLM",), {"HYV3Attention": QKV, "HYV3MLP": GATE_UP}),
    "hy_v4": Standard(
        ("HYV4ForCausalLM",),
        {
            "HYV4Attention": ("gate_proj q_a_proj kv_a_proj_with_mqa",),
            "HYV4Indexer": ("wk weights_proj",),
            "HYV4MLP": GATE_UP,
        },
    ),
    "hyperclovax": Standard(("HyperCLOVAXForCausalLM",), {"HyperCLOVAXAttention": QKV, "HyperCLOVAXMLP": GATE_UP}),
    "hyperclovax_vision_v2": Standard(("HyperCLOVAXVisionV2ForConditionalGeneration",), {}),
    "idefics": Standard(
        ("IdeficsForVisionText2Text",),
        {"IdeficsVisionAttention": QKV, "IdeficsAttention": QKV, "IdeficsMLP": GATE_UP},
        modeling="vision",
    ),
    "idefics2": Standard(
        ("Idefics2ForConditionalGeneration",),
        {"Idefics2VisionAttention": QKV, "Idefics2MLP": GATE_UP, "Idefics2PerceiverAttention": ("k_proj v_proj",)},
    ),
    "idefics3": Standard(("Idefics3ForConditionalGeneration",), {"Idefics3VisionAttention": QKV}),
    "inkling": Standard(("InklingForCausalLM",), {"InklingAttention": ("q_proj k_proj v_proj r_proj",)}),
    "inkling2": Standard(
        ("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"),
        {
            "Inkling2SlidingAttention": ("q_proj k_proj v_proj r_proj gate_proj sink_proj",),
            "Inkling2FullAttention": ("q_proj r_proj gate_proj sink_proj",),
            "Inkling2VisionAttention": QKV,
        },
    ),
    "instructblip": Standard(
        ("InstructBlipForConditionalGeneration",), {"InstructBlipQFormerMultiHeadAttention": ("query key value",)}
    ),
    "instructblipvideo": Standard(
        ("InstructBlipVideoForConditionalGeneration",),
        {"InstructBlipVideoQFormerMultiHeadAttention": ("query key value",)},
    ),
    "internvl": Standard(("InternVLForConditionalGeneration",), {"InternVLVisionAttention": QKV}),
    "jais2": Standard(("Jais2ForCausalLM",), {"Jais2Attention": QKV}),
    "jamba": Standard(
        ("JambaForCausalLM", "JambaForSequenceClassification"), {"JambaMLP": GATE_UP, "JambaAttention": QKV}
    ),
    "janus": Standard(("JanusForConditionalGeneration",), {"JanusVisionAttention": QKV}),
    "kimi_linear": Standard(
        ("KimiLinearForCausalLM",),
        {
            "KimiLinearDeltaAttention": ("q_proj k_proj v_proj b_proj g_a_proj",),
            "KimiLinearMLP": GATE_UP,
            "KimiLinearAttention": ("q_proj kv_a_proj_with_mqa",),
        },
    ),
    "kolibri1": Standard(("Kolibri1ForCausalLM",), {"Kolibri1Attention": QKV, "Kolibri1MLP": GATE_UP}),
    "kosmos2": Standard(
        ("Kosmos2ForConditionalGeneration",), {"Kosmos2VisionAttention": QKV, "KosmosTextAttention": QKV}
    ),
    "kosmos2_5": Standard(
        ("Kosmos2_5ForConditionalGeneration",),
        {
            "Kosmos2_5VisionAttention": ("query key value",),
            "Kosmos2_5VisionMlp": ("wi_0 wi_1",),
            "Kosmos2_5TextAttention": ("k_proj v_proj q_proj",),
        },
    ),
    "laguna": Standard(
        ("LagunaForCausalLM",), {"LagunaAttention": ("q_proj k_proj v_proj g_proj",), "LagunaMLP": GATE_UP}
    ),
    "lfm2": Standard(("Lfm2ForCausalLM",), {"Lfm2Attention": QKV, "Lfm2MLP": ("w1 w3",)}),
    "lfm2_moe": Standard(("Lfm2MoeForCausalLM",), {"Lfm2MoeMLP": ("w1 w3",), "Lfm2MoeAttention": QKV}),
    "lfm2_vl": Standard(("Lfm2VlForConditionalGeneration",), {}),
    "lfm3": Standard(("Lfm3ForCausalLM",), {"Lfm3MLP": ("w1 w3",), "Lfm3Attention": ("q_proj k_proj v_proj g_proj",)}),
    "lfm3_vl": Standard(
        ("Lfm3VlForConditionalGeneration",), {"Lfm3VlVisionMLP": ("w1 w3",), "Lfm3VlVisionAttention": QKV}
    ),
    "lighton_ocr": Standard(("LightOnOcrForConditionalGeneration",), {}),
    "llama4": Standard(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        {"Llama4TextAttention": QKV, "Llama4TextMLP": GATE_UP, "Llama4VisionAttention": QKV},
    ),
    "llava": Standard(("LlavaForConditionalGeneration",), {}),
    "llava_next": Standard(("LlavaNextForConditionalGeneration",), {}),
    "llava_next_video": Standard(("LlavaNextVideoForConditionalGeneration",), {}),
    "llava_onevision": Standard(("LlavaOnevisionForConditionalGeneration",), {}),
    "longcat_flash": Standard(
        ("LongcatFlashForCausalLM",), {"LongcatFlashMLA": ("q_a_proj kv_a_proj_with_mqa",), "LongcatFlashMLP": GATE_UP}
    ),
    "marian": Standard(("MarianForCausalLM",), {"MarianAttention": QKV}),
    "mbart": Standard(("MBartForCausalLM",), {"MBartAttention": QKV}),
    "megatron_bert": Standard(("MegatronBertForCausalLM",), {"MegatronBertSelfAttention": ("query key value",)}),
    "mellum": Standard(("MellumForCausalLM",), {"MellumAttention": QKV}),
    "mimo_v2_flash": Standard(("MiMoV2FlashForCausalLM",), {"MiMoV2FlashAttention": QKV, "MiMoV2FlashMLP": GATE_UP}),
    "minicpm3": Standard(
        ("MiniCPM3ForCausalLM", "MiniCPM3ForSequenceClassification"),
        {"MiniCPM3Attention": ("q_a_proj kv_a_proj_with_mqa",), "MiniCPM3MLP": GATE_UP},
    ),
    "minicpm_ocr": Standard(("MiniCPMOcrForConditionalGeneration",), {"MiniCPMOcrVisionAttention": QKV}),
    "minicpmv4_6": Standard(("MiniCPMV4_6ForConditionalGeneration",), {"MiniCPMV4_6VisionAttention": QKV}),
    "minicpmv4_7": Standard(("MiniCPMV4_7ForConditionalGeneration",), {"MiniCPMV4_7VisionAttention": QKV}),
    "minimax": Standard(
        ("MiniMaxForCausalLM", "MiniMaxForSequenceClassification", "MiniMaxForTokenClassification"),
        {"MiniMaxAttention": QKV, "MiniMaxLightningAttention": ("qkv_proj output_gate",)},
    ),
    "minimax_m2": Standard(("MiniMaxM2ForCausalLM",), {"MiniMaxM2Attention": QKV}),
    "minimax_m3_vl": Standard(
        ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"),
        {"MiniMaxM3VLVisionAttention": QKV, "MiniMaxM3VLAttention": QKV},
    ),
    "ministral": Standard(
        ("MinistralForCausalLM", "MinistralForSequenceClassification", "MinistralForTokenClassification"),
        {"MinistralAttention": QKV, "MinistralMLP": GATE_UP},
    ),
    "ministral3": Standard(
        ("Ministral3ForCausalLM", "Ministral3ForSequenceClassification", "Ministral3ForTokenClassification"),
        {"Ministral3Attention": QKV, "Ministral3MLP": GATE_UP},
    ),
    "mistral_large4": Standard(
        ("MistralLarge4ForConditionalGeneration",),
        {
            "MistralLarge4TextAttention": ("q_proj kv_a_proj_with_mqa",),
            "MistralLarge4TextIndexer": ("wk weights_proj",),
            "MistralLarge4TextMLP": GATE_UP,
        },
    ),
    "mllama": Standard(
        ("MllamaForCausalLM", "MllamaForConditionalGeneration"),
        {
            "MllamaTextSelfAttention": QKV,
            "MllamaTextMLP": GATE_UP,
            "MllamaVisionAttention": QKV,
            "MllamaTextCrossAttention": ("k_proj v_proj",),
        },
    ),
    "modernbert_decoder": Standard(
        ("ModernBertDecoderForCausalLM", "ModernBertDecoderForSequenceClassification"),
        {"ModernBertDecoderAttention": QKV},
    ),
    "molmo2": Standard(
        ("Molmo2ForConditionalGeneration",),
        {
            "Molmo2VisionAttention": QKV,
            "Molmo2ImageProjectorMLP": GATE_UP,
            "Molmo2Attention": QKV,
            "Molmo2MLP": GATE_UP,
        },
    ),
    "moss_transcribe_diarize": Standard(("MossTranscribeDiarizeForConditionalGeneration",), {}),
    "muse_glimmer": Standard(
        ("MuseGlimmerForConditionalGeneration",),
        {
            "MuseGlimmerVisionAttention": QKV,
            "MuseGlimmerTextAttention": ("q_proj k_proj v_proj gate_proj",),
            "MuseGlimmerTextMLP": GATE_UP,
        },
    ),
    "muse_spark": Standard(
        ("MuseSparkForConditionalGeneration",),
        {"MuseSparkVisionAttention": QKV, "MuseSparkTextAttention": ("q_proj k_proj v_proj gate_proj",)},
    ),
    "mvp": Standard(("MvpForCausalLM",), {"MvpAttention": QKV}),
    "nanochat": Standard(("NanoChatForCausalLM",), {"NanoChatAttention": QKV}),
    "nemotron": Standard(
        ("NemotronForCausalLM", "NemotronForSequenceClassification", "NemotronForTokenClassification"),
        {"NemotronAttention": QKV},
    ),
    "nemotron3_5_transcribe": Standard(("Nemotron3_5TranscribeForConditionalGeneration",), {}),
    "nemotron_h_omni": Standard(("NemotronH_Omni_Reasoning_V3",), {}),
    "olmo": Standard(("OlmoForCausalLM", "OlmoForSequenceClassification"), {"OlmoAttention": QKV, "OlmoMLP": GATE_UP}),
    "olmo2": Standard(
        ("Olmo2ForCausalLM", "Olmo2ForSequenceClassification"), {"Olmo2Attention": QKV, "Olmo2MLP": GATE_UP}
    ),
    "olmo3": Standard(
        ("Olmo3ForCausalLM", "Olmo3ForSequenceClassification"), {"Olmo3Attention": QKV, "Olmo3MLP": GATE_UP}
    ),
    "olmo_hybrid": Standard(
        ("OlmoHybridForCausalLM",),
        {
            "OlmoHybridGatedDeltaNet": ("q_proj k_proj v_proj b_proj a_proj g_proj",),
            "OlmoHybridMLP": GATE_UP,
            "OlmoHybridAttention": QKV,
        },
    ),
    "olmoe": Standard(("OlmoeForCausalLM",), {"OlmoeAttention": QKV}),
    "opt": Standard(("OPTForCausalLM", "OPTForSequenceClassification"), {"OPTAttention": QKV}),
    "ovis2": Standard(("Ovis2ForConditionalGeneration",), {"Ovis2VisionAttention": QKV, "Ovis2MLP": GATE_UP}),
    "paddleocr_vl": Standard(
        ("PaddleOCRVLForConditionalGeneration",),
        {"PaddleOCRVisionAttention": QKV, "PaddleOCRAttention": QKV, "PaddleOCRMLP": GATE_UP},
    ),
    "paligemma": Standard(("PaliGemmaForConditionalGeneration",), {}),
    "pegasus": Standard(("PegasusForCausalLM",), {"PegasusAttention": QKV}),
    "phi": Standard(
        ("PhiForCausalLM", "PhiForSequenceClassification", "PhiForTokenClassification"), {"PhiAttention": QKV}
    ),
    "phimoe": Standard(("PhimoeForCausalLM", "PhimoeForSequenceClassification"), {"PhimoeAttention": QKV}),
    "pix2struct": Standard(
        ("Pix2StructForConditionalGeneration",),
        {
            "Pix2StructVisionAttention": ("query key value",),
            "Pix2StructVisionMlp": ("wi_0 wi_1",),
            "Pix2StructTextAttention": ("query key value",),
            "Pix2StructTextDenseGatedActDense": ("wi_0 wi_1",),
        },
    ),
    "pixtral": Standard((), {"PixtralAttention": QKV, "PixtralMLP": GATE_UP}),
    "plbart": Standard(("PLBartForCausalLM",), {"PLBartAttention": QKV}),
    "pp_formulanet": Standard(("PPFormulaNetForConditionalGeneration",), {"PPFormulaNetAttention": QKV}),
    "prophetnet": Standard(
        ("ProphetNetForCausalLM",), {"ProphetNetNgramSelfAttention": ("query_proj key_proj value_proj",)}
    ),
    "qianfan_ocr": Standard(("QianfanOCRForConditionalGeneration",), {"QianfanOCRVisionAttention": QKV}),
    "qwen2_5_omni": Standard(
        ("Qwen2_5OmniThinkerForConditionalGeneration",),
        {
            "Qwen2_5OmniVisionAttention": ("q k v",),
            "Qwen2_5OmniMLP": GATE_UP,
            "Qwen2_5OmniAttention": QKV,
            "Qwen2MLP": GATE_UP,
        },
    ),
    "qwen2_audio": Standard(("Qwen2AudioForConditionalGeneration",), {}),
    "qwen2_moe": Standard(
        ("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification", "Qwen2MoeForTokenClassification"),
        {"Qwen2MoeAttention": QKV, "Qwen2MoeMLP": GATE_UP},
    ),
    "qwen3_asr": Standard(("Qwen3ASRForConditionalGeneration",), {}),
    "qwen3_next": Standard(
        ("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification", "Qwen3NextForTokenClassification"),
        {"Qwen3NextGatedDeltaNet": ("in_proj_qkvz in_proj_ba",), "Qwen3NextMLP": GATE_UP, "Qwen3NextAttention": QKV},
    ),
    "qwen3_omni_moe": Standard(
        ("Qwen3OmniMoeThinkerForConditionalGeneration",), {"Qwen3OmniMoeThinkerTextAttention": QKV}
    ),
    "qwen3_vl": Standard(
        ("Qwen3VLForConditionalGeneration",), {"Qwen3VLTextAttention": QKV, "Qwen3VLTextMLP": GATE_UP}
    ),
    "qwen3_vl_moe": Standard(("Qwen3VLMoeForConditionalGeneration",), {"Qwen3VLMoeTextAttention": QKV}),
    "qwen4_exp": Standard(
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        {
            "Qwen4ExpTextGatedResidual": ("input_mix_weight_down block_inject_weight",),
            "Qwen4ExpTextGatedDeltaNet": ("in_proj_qkv in_proj_z in_proj_b in_proj_a",),
            "Qwen4ExpTextMLP": GATE_UP,
            "Qwen4ExpTextAttention": QKV,
        },
    ),
    "radio": Standard((), {"RadioAttention": QKV}),
    "recurrent_gemma": Standard(
        ("RecurrentGemmaForCausalLM",),
        {
            "RecurrentGemmaRecurrentBlock": ("linear_y linear_x",),
            "RecurrentGemmaMlp": GATE_UP,
            "RecurrentGemmaAttention": QKV,
        },
    ),
    "reformer": Standard(
        ("ReformerModelWithLMHead",),
        {"LocalSelfAttention": ("query key value",), "LSHSelfAttention": ("query_key value",)},
    ),
    "rembert": Standard(("RemBertForCausalLM",), {"RemBertSelfAttention": ("query key value",)}),
    "roberta": Standard(("RobertaForCausalLM",), {"RobertaSelfAttention": ("query key value",)}),
    "roberta_prelayernorm": Standard(
        ("RobertaPreLayerNormForCausalLM",), {"RobertaPreLayerNormSelfAttention": ("query key value",)}
    ),
    "roc_bert": Standard(
        ("RoCBertForCausalLM", "RoCBertForSequenceClassification", "RoCBertForTokenClassification"),
        {"RoCBertSelfAttention": ("query key value",)},
    ),
    "roformer": Standard(("RoFormerForCausalLM",), {"RoFormerSelfAttention": ("query key value",)}),
    "seed_oss": Standard(
        ("SeedOssForCausalLM", "SeedOssForSequenceClassification", "SeedOssForTokenClassification"),
        {"SeedOssAttention": QKV, "SeedOssMLP": GATE_UP},
    ),
    "siglip": Standard((), {"SiglipAttention": QKV}),
    "siglip2": Standard((), {"Siglip2Attention": QKV}),
    "smollm3": Standard(
        ("SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification", "SmolLM3ForTokenClassification"),
        {"SmolLM3Attention": QKV, "SmolLM3MLP": GATE_UP},
    ),
    "smolvlm": Standard(("SmolVLMForConditionalGeneration",), {"SmolVLMVisionAttention": QKV}),
    "solar_open": Standard(("SolarOpenForCausalLM",), {"SolarOpenAttention": QKV, "SolarOpenMLP": GATE_UP}),
    "stablelm": Standard(
        ("StableLmForCausalLM", "StableLmForSequenceClassification", "StableLmForTokenClassification"),
        {"StableLmAttention": QKV, "StableLmMLP": GATE_UP},
    ),
    "starcoder2": Standard(
        ("Starcoder2ForCausalLM", "Starcoder2ForSequenceClassification", "Starcoder2ForTokenClassification"),
        {"Starcoder2Attention": QKV},
    ),
    "step3p7": Standard(
        ("Step3p7ForConditionalGeneration",),
        {"Step3p7VisionAttention": QKV, "Step3p7Attention": ("q_proj k_proj v_proj g_proj",), "Step3p7MLP": GATE_UP},
    ),
    "t5gemma2": Standard(
        ("T5Gemma2ForConditionalGeneration",),
        {"T5Gemma2SelfAttention": QKV, "T5Gemma2MLP": GATE_UP, "T5Gemma2MergedAttention": ("k_proj v_proj",)},
    ),
    "trocr": Standard(("TrOCRForCausalLM",), {"TrOCRAttention": QKV}),
    "unlimited_ocr": Standard(
        ("UnlimitedOcrForConditionalGeneration",),
        {"UnlimitedOcrAttention": QKV, "UnlimitedOcrTextAttention": QKV, "UnlimitedOcrTextMLP": GATE_UP},
    ),
    "vaultgemma": Standard(("VaultGemmaForCausalLM",), {"VaultGemmaAttention": QKV, "VaultGemmaMLP": GATE_UP}),
    "video_llama_3": Standard(("VideoLlama3ForConditionalGeneration",), {"VideoLlama3VisionAttention": QKV}),
    "video_llava": Standard(("VideoLlavaForConditionalGeneration",), {}),
    "vipllava": Standard(("VipLlavaForConditionalGeneration",), {}),
    "vision_encoder_decoder": Standard(("VisionEncoderDecoderModel",), {}),
    "vit": Standard((), {"ViTAttention": QKV}),
    "voxtral": Standard(("VoxtralForConditionalGeneration",), {}),
    "xglm": Standard(("XGLMForCausalLM",), {"XGLMAttention": QKV}),
    "xlm_roberta": Standard(("XLMRobertaForCausalLM",), {"XLMRobertaSelfAttention": ("query key value",)}),
    "xlm_roberta_xl": Standard(("XLMRobertaXLForCausalLM",), {"XLMRobertaXLSelfAttention": ("query key value",)}),
    "xlstm": Standard(("xLSTMForCausalLM",), {"xLSTMFeedForward": ("proj_up_gate proj_up",)}),
    "xmod": Standard(("XmodForCausalLM",), {"XmodSelfAttention": ("query key value",)}),
    "youtu": Standard(("YoutuForCausalLM",), {"YoutuAttention": ("q_a_proj kv_a_proj_with_mqa",), "YoutuMLP": GATE_UP}),
    "zamba": Standard(
        ("ZambaForCausalLM", "ZambaForSequenceClassification"), {"ZambaAttention": QKV, "ZambaMLP": GATE_UP}
    ),
    "zamba2": Standard(("Zamba2ForCausalLM", "Zamba2ForSequenceClassification"), {"Zamba2Attention": QKV}),
    "zaya": Standard(("ZayaForCausalLM",), {"ZayaCCAProjection": ("q_proj k_proj v_proj_current",)}),
}
"""The rows, by package."""
