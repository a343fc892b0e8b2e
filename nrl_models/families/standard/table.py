"""Which linears of which layers read one input, for families that need nothing else said.

A row is a package of transformers (`transformers.models.NAME.modeling_NAME`): the architectures served, and for each
layer class the linears that are combined, a string for a group. The generated tests hold every row against a trace of
the model, so a row that is wrong or lacks a group fails. Importing this imports no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Standard:
    """One package of transformers.

    Args:
        architectures: classes of the package that are served.
        layers: for each layer class of the package its groups, as `nrl_models.common.projections.combine_groups` takes
            them: the names of linears with spaces between; before them, with a colon, what the module that computes
            them is called, where that is not the rule's name; after them, with an `@`, where they are combined, if the
            class reads one input in some places and two in others. A class of another module of the package has
            that module's name before its own (`vision.IdeficsVisionAttention`).
        mixins: for each other class of the package that is rewritten the mixin of `nrl_models.common.mrope` that goes
            before it.
        tiny: as `FamilyModel.tiny`.
        limits: as `FamilyModel.limits`; what holds for one architecture only stands under `"Architecture: feature"`.
        ignored: as `FamilyModel.ignored_config_keys`.
        requires: what the classes need beyond what this package does, e.g. `transformers>=5.23`.
        modeling: the module that has the classes, where it is not called as the package.
        config_values: as `FamilyModel.config_values`.
        tensor_parallel: as `FamilyModel.tensor_parallel`.
    """

    architectures: tuple[str, ...]
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixins: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    requires: str = ""
    modeling: str = ""
    config_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)

    def module(self, package: str) -> str:
        """The full name of the module that has the classes."""
        return f"transformers.models.{package}.{self.modeling or f'modeling_{package}'}"

    def layer(self, package: str, name: str) -> type | None:
        """A class that the row names; None if the installed transformers has no such class."""
        module, _, own_name = name.rpartition(".")
        found = f"transformers.models.{package}.{module}" if module else self.module(package)
        return getattr(import_module(found), own_name, None)

    def limits_of(self, architecture: str) -> dict[str, str]:
        """The limits of one architecture, by feature."""
        found = {}
        for key, reason in self.limits.items():
            name, _, feature = key.rpartition(": ")
            if name in ("", architecture):
                found[feature] = reason
        return found


UPSTREAM_LACKS: Mapping[str, str] = {
    "activation checkpointing": "transformers' own model does not support it",
    "left padding": "transformers' own model gives a sequence other logits when it is padded on the left",
    "right padding": "transformers' own model gives a sequence other logits when it is padded on the right",
    "packed sequences": "in transformers' own model documents in one row see each other, whatever their positions",
    "router replay": "transformers' own model does not use the indices of the `topk` that are replayed",
    "cached decoding": "transformers' own model decodes other logits with a cache than without, or keeps none",
    "batch order": "transformers' own model gives a sequence with an image other logits in another row of the batch",
    "generate": "transformers' own `generate` asks the configuration for a token that it does not have",
    "tensor parallelism": "divided by transformers' plan it is not the model that one process computes",
}
"""Features that some of transformers' classes lack, and how."""


def lacks(*features: str) -> dict[str, str]:
    """The limits of a model of which transformers' own class fails the same tests.

    Args:
        features: of `UPSTREAM_LACKS`, each with `"Architecture: "` before it if it is of one only.
    """
    return {feature: UPSTREAM_LACKS[feature.rpartition(": ")[2]] for feature in features}


def needs_images(*features: str) -> dict[str, str]:
    """The limits of a model that describes images: what is proven with text alone is not proven of it."""
    return dict.fromkeys(features, "transformers' own model takes no text without an image")


def reads_apart(*features: str) -> dict[str, str]:
    """The limits of a model with an encoder: what is proven of one sequence, read and written, does not apply."""
    return dict.fromkeys(features, "an encoder reads the prompt, and the decoder writes another sequence")


QKV = ("q_proj k_proj v_proj",)
GATE_UP = ("gate_proj up_proj",)
QFORMER = ("query key value @ attention.attention", "key value @ crossattention")
STANDARD: dict[str, Standard] = {
    "afmoe": Standard(
        ("AfmoeForCausalLM",),
        {"AfmoeAttention": ("q_proj k_proj v_proj gate_proj",), "AfmoeMLP": GATE_UP},
        limits=lacks("packed sequences"),
        config_values={"score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,), "topk_group": (1,)},
    ),
    "apertus": Standard(
        ("ApertusForCausalLM", "ApertusForTokenClassification"),
        {"ApertusAttention": QKV},
        # Its activation has parameters, which see a rank's share of the features.
        tensor_parallel={"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    ),
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
        config_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
    "axk2": Standard(
        ("AXK2ForCausalLM", "AXK2ForSequenceClassification", "AXK2ForTokenClassification"),
        {"AXK2Attention": ("q_a_proj kv_a_proj_with_mqa",), "AXK2Indexer": ("wk weights_proj",), "AXK2MLP": GATE_UP},
        limits=lacks("cached decoding"),
        requires="transformers>=5.18",
    ),
    "aya_vision": Standard(("AyaVisionForConditionalGeneration",), {}),
    "bailing_hybrid": Standard(
        ("BailingHybridForCausalLM",),
        {
            "BailingHybridDeltaAttention": ("q_proj k_proj v_proj b_proj g_proj",),
            "BailingHybridMLP": GATE_UP,
            "BailingHybridAttention": ("q_proj kv_a_proj_with_mqa g_proj",),
        },
        limits=lacks("packed sequences"),
        requires="transformers>=5.23",
    ),
    "bamba": Standard(
        ("BambaForCausalLM",),
        {"BambaMLP": GATE_UP, "BambaAttention": QKV},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "bart": Standard(
        ("BartForCausalLM",),
        {"BartAttention": ("q_proj k_proj v_proj @ self_attn", "k_proj v_proj @ encoder_attn")},
        limits=lacks("left padding", "packed sequences"),
    ),
    "beam": Standard(
        ("BeamForCausalLM",),
        {"BeamAttention": ("q_proj k_proj v_proj gate_proj",), "BeamMLP": GATE_UP},
        requires="transformers>=5.23",
    ),
    "bert": Standard(
        ("BertLMHeadModel",),
        {"BertSelfAttention": ("query key value",), "BertCrossAttention": ("key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "bert_generation": Standard(
        ("BertGenerationDecoder",),
        {"BertGenerationSelfAttention": ("query key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "bigbird_pegasus": Standard(
        ("BigBirdPegasusForCausalLM",),
        {"BigBirdPegasusDecoderAttention": QKV},
        limits=lacks("left padding", "packed sequences"),
    ),
    "biogpt": Standard(
        ("BioGptForCausalLM", "BioGptForSequenceClassification", "BioGptForTokenClassification"),
        {"BioGptAttention": QKV},
        limits=lacks("packed sequences"),
    ),
    "bitnet": Standard(("BitNetForCausalLM",), {"BitNetAttention": QKV, "BitNetMLP": GATE_UP}),
    "blenderbot": Standard(
        ("BlenderbotForCausalLM",), {"BlenderbotAttention": QKV}, limits=lacks("left padding", "packed sequences")
    ),
    "blenderbot_small": Standard(
        ("BlenderbotSmallForCausalLM",),
        {"BlenderbotSmallAttention": QKV},
        limits=lacks("left padding", "packed sequences"),
    ),
    "blip": Standard(
        ("BlipForConditionalGeneration",),
        {"modeling_blip_text.BlipTextSelfAttention": ("query key value @ attention", "key value @ crossattention")},
        limits=needs_images("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "blip_2": Standard(
        ("Blip2ForConditionalGeneration",),
        {"Blip2QFormerMultiHeadAttention": QFORMER},
        limits=needs_images("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "blt": Standard(
        ("BltForCausalLM",),
        {"BltSelfAttention": QKV, "BltMLP": GATE_UP, "BltCrossAttention": ("k_proj v_proj",)},
        limits=lacks("left padding", "packed sequences", "cached decoding"),
    ),
    "camembert": Standard(
        ("CamembertForCausalLM",),
        {"CamembertSelfAttention": ("query key value",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "chameleon": Standard(("ChameleonForConditionalGeneration",), {"ChameleonAttention": QKV, "ChameleonMLP": GATE_UP}),
    "clip": Standard((), {"CLIPAttention": QKV}),
    "cohere": Standard(("CohereForCausalLM",), {"CohereAttention": QKV, "CohereMLP": GATE_UP}),
    "cohere2": Standard(("Cohere2ForCausalLM",), {"Cohere2Attention": QKV, "Cohere2MLP": GATE_UP}),
    "cohere2_moe": Standard(("Cohere2MoeForCausalLM",), {"Cohere2MoeAttention": QKV}),
    "cohere2_vision": Standard(("Cohere2VisionForConditionalGeneration",), {}),
    "cohere_compass": Standard(
        ("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
        {"CohereCompassAttention": QKV, "CohereCompassMLP": GATE_UP},
        mixins={"CohereCompassModel": "FreshPositions"},
    ),
    "cosmos3_edge": Standard(
        ("Cosmos3EdgeForConditionalGeneration",),
        {"Cosmos3EdgeVisionAttention": QKV, "Cosmos3EdgeTextAttention": QKV},
        mixins={"Cosmos3EdgeModel": "FreshPositions"},
        limits=lacks("packed sequences"),
        requires="transformers>=5.23",
    ),
    "cosmos3_omni": Standard(
        ("Cosmos3OmniForConditionalGeneration",), {}, mixins={"Cosmos3OmniModel": "FreshPositions"}
    ),
    "cpmant": Standard(
        ("CpmAntForCausalLM",),
        {"CpmAntAttention": ("project_q project_k project_v",), "CpmAntDenseGatedACT": ("w_0 w_1",)},
        limits=lacks("activation checkpointing", "right padding", "packed sequences", "cached decoding"),
    ),
    "ctrl": Standard(
        ("CTRLLMHeadModel",), {"MultiHeadAttention": ("Wq Wk Wv",)}, limits=lacks("activation checkpointing")
    ),
    "cwm": Standard(("CwmForCausalLM",), {"CwmAttention": QKV, "CwmMLP": GATE_UP}),
    "data2vec": Standard(
        ("Data2VecTextForCausalLM",),
        {"Data2VecTextSelfAttention": ("query key value",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
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
        tiny={"n_routed_experts": 4},  # with others, two words score alike in the indexer
        limits=lacks("cached decoding"),
        requires="transformers>=5.18",
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
        tiny={"index_topk": 2},  # of what four words are compressed to each
        limits=lacks("left padding", "packed sequences"),
        requires="transformers>=5.23",
    ),
    "deepseek_vl": Standard(("DeepseekVLForConditionalGeneration",), {}),
    "deepseek_vl_hybrid": Standard(("DeepseekVLHybridForConditionalGeneration",), {}),
    "diffllama": Standard(
        ("DiffLlamaForCausalLM", "DiffLlamaForSequenceClassification", "DiffLlamaForTokenClassification"),
        {"DiffLlamaAttention": QKV, "DiffLlamaMLP": GATE_UP},
    ),
    "doge": Standard(
        ("DogeForCausalLM", "DogeForSequenceClassification"),
        {"DogeAttention": QKV, "DogeMLP": GATE_UP},
        limits=lacks("tensor parallelism"),
        requires="transformers>=5.18",
    ),
    "dots1": Standard(("Dots1ForCausalLM",), {"Dots1Attention": QKV, "Dots1MLP": GATE_UP}),
    "dots3_note": Standard(
        ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
        {
            "Dots3NoteTextAttention": ("q_a_proj kv_a_proj_with_mqa g_proj",),
            "Dots3NoteTextIndexer": ("wk weights_proj",),
            "Dots3NoteTextMLP": GATE_UP,
            "Dots3NoteVisionMLP": GATE_UP,
        },
        limits=lacks("Dots3NoteForCausalLM: cached decoding"),
        requires="transformers>=5.23",
    ),
    "electra": Standard(
        ("ElectraForCausalLM",),
        {"ElectraSelfAttention": ("query key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "emu3": Standard(
        ("Emu3ForCausalLM", "Emu3ForConditionalGeneration"),
        {"Emu3Attention": QKV, "Emu3MLP": GATE_UP, "Emu3VQVAEAttentionBlock": QKV},
    ),
    "ernie": Standard(
        ("ErnieForCausalLM",),
        {"ErnieSelfAttention": ("query key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "ernie4_5": Standard(("Ernie4_5ForCausalLM",), {"Ernie4_5Attention": QKV, "Ernie4_5MLP": GATE_UP}),
    "ernie4_5_moe": Standard(("Ernie4_5_MoeForCausalLM",), {"Ernie4_5_MoeAttention": QKV, "Ernie4_5_MoeMLP": GATE_UP}),
    "ernie4_5_vl_moe": Standard(
        ("Ernie4_5_VLMoeForConditionalGeneration",),
        {"Ernie4_5_VLMoeTextAttention": QKV, "Ernie4_5_VLMoeMLP": GATE_UP},
        mixins={"Ernie4_5_VLMoeModel": "FreshPositions"},
        limits=lacks("packed sequences"),
    ),
    "evolla": Standard(
        ("EvollaForProteinText2Text",), {"EvollaAttention": QKV, "EvollaMLP": GATE_UP}, limits=lacks("packed sequences")
    ),
    "exaone4": Standard(
        ("Exaone4ForCausalLM", "Exaone4ForSequenceClassification", "Exaone4ForTokenClassification"),
        {"Exaone4Attention": QKV, "Exaone4MLP": GATE_UP},
    ),
    "exaone4_5": Standard(("Exaone4_5_ForConditionalGeneration",), {"Exaone4_5_MLP": GATE_UP}),
    "exaone_moe": Standard(("ExaoneMoeForCausalLM",), {"ExaoneMoeAttention": QKV, "ExaoneMoeMLP": GATE_UP}),
    "falcon_h1": Standard(
        ("FalconH1ForCausalLM",),
        {"FalconH1Attention": QKV, "FalconH1MLP": ("up_proj gate_proj",)},
        limits=lacks("packed sequences"),
    ),
    "flex_olmo": Standard(("FlexOlmoForCausalLM",), {"FlexOlmoAttention": QKV}),
    "flint": Standard(
        ("FlintForCausalLM",), {"FlintAttention": QKV, "FlintMLP": GATE_UP}, requires="transformers>=5.23"
    ),
    "florence2": Standard(
        ("Florence2ForConditionalGeneration",),
        {},
        limits=reads_apart("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "gemma": Standard(
        ("GemmaForCausalLM", "GemmaForSequenceClassification", "GemmaForTokenClassification"),
        {"GemmaAttention": QKV, "GemmaMLP": GATE_UP},
    ),
    "gemma4_unified": Standard(
        ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        {"Gemma4UnifiedTextAttention": QKV, "Gemma4UnifiedTextMLP": GATE_UP},
        tiny={"audio_config": {}},
    ),
    "git": Standard(
        ("GitForCausalLM",),
        {"GitVisionAttention": QKV, "GitSelfAttention": ("query key value",)},
        requires="transformers>=5.23",
    ),
    "glm": Standard(
        ("GlmForCausalLM", "GlmForSequenceClassification", "GlmForTokenClassification"), {"GlmAttention": QKV}
    ),
    "glm4": Standard(
        ("Glm4ForCausalLM", "Glm4ForSequenceClassification", "Glm4ForTokenClassification"), {"Glm4Attention": QKV}
    ),
    "glm46v": Standard(
        ("Glm46VForConditionalGeneration",),
        {},
        mixins={"Glm46VModel": "FreshPositions"},
    ),
    "glm4_moe": Standard(("Glm4MoeForCausalLM",), {"Glm4MoeAttention": QKV, "Glm4MoeMLP": GATE_UP}),
    "glm4_moe_lite": Standard(
        ("Glm4MoeLiteForCausalLM",),
        {"Glm4MoeLiteAttention": ("q_a_proj kv_a_proj_with_mqa",), "Glm4MoeLiteMLP": GATE_UP},
        config_values={"topk_method": ("noaux_tc",), "first_k_dense_replace": (1,), "moe_layer_freq": (1,)},
    ),
    "glm4v": Standard(
        ("Glm4vForConditionalGeneration",),
        {"Glm4VisionMlp": GATE_UP, "Glm4vVisionPatchMerger": GATE_UP, "Glm4vTextAttention": QKV},
        mixins={"Glm4vModel": "FreshPositions", "Glm4vTextModel": "PackedTextPositions"},
    ),
    "glm4v_moe": Standard(
        ("Glm4vMoeForConditionalGeneration",),
        {
            "Glm4vMoeisionMlp": GATE_UP,
            "Glm4vMoeVisionPatchMerger": GATE_UP,
            "Glm4vMoeTextAttention": QKV,
            "Glm4vMoeTextMLP": GATE_UP,
        },
        mixins={"Glm4vMoeModel": "FreshPositions", "Glm4vMoeTextModel": "PackedTextPositions"},
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
        limits=lacks("packed sequences", "tensor parallelism"),
    ),
    "glm_moe_dsa": Standard(
        ("GlmMoeDsaForCausalLM",),
        {
            "GlmMoeDsaAttention": ("q_a_proj kv_a_proj_with_mqa",),
            "GlmMoeDsaIndexer": ("wk weights_proj",),
            "GlmMoeDsaMLP": GATE_UP,
        },
        limits=lacks("cached decoding"),
        requires="transformers>=5.18",
    ),
    "glm_ocr": Standard(
        ("GlmOcrForConditionalGeneration",),
        {"GlmOcrVisionMlp": GATE_UP, "GlmOcrVisionPatchMerger": GATE_UP, "GlmOcrTextAttention": QKV},
        mixins={"GlmOcrModel": "FreshPositions", "GlmOcrTextModel": "PackedTextPositions"},
    ),
    "glmasr": Standard(("GlmAsrForConditionalGeneration",), {}),
    "got_ocr2": Standard(("GotOcr2ForConditionalGeneration",), {}),
    "gpt_neo": Standard(
        ("GPTNeoForCausalLM", "GPTNeoForSequenceClassification", "GPTNeoForTokenClassification"),
        {"GPTNeoSelfAttention": QKV},
    ),
    "gptj": Standard(("GPTJForCausalLM",), {"GPTJAttention": QKV}),
    "granite": Standard(("GraniteForCausalLM",), {"GraniteAttention": QKV, "GraniteMLP": GATE_UP}),
    "granite4_vision": Standard(
        ("Granite4VisionForConditionalGeneration",),
        {"Granite4VisionTextAttention": QKV, "Granite4VisionTextMLP": GATE_UP},
        limits=lacks("cached decoding"),
        requires="transformers>=5.23",
    ),
    "granite_docling": Standard(
        ("GraniteDoclingForConditionalGeneration",),
        {"GraniteDoclingVisionAttention": QKV, "GraniteDoclingTextAttention": QKV, "GraniteDoclingTextMLP": GATE_UP},
        requires="transformers>=5.23",
    ),
    "granite_speech": Standard(
        ("GraniteSpeechForConditionalGeneration",),
        {"GraniteSpeechConformerAttention": ("to_q to_kv",)},
        limits=lacks("activation checkpointing"),
    ),
    "granite_speech_plus": Standard(
        ("GraniteSpeechPlusForConditionalGeneration",),
        {"GraniteSpeechPlusConformerAttention": ("to_q to_kv",)},
        limits=lacks("activation checkpointing"),
    ),
    "granite_swa": Standard(("GraniteSWAForCausalLM",), {"GraniteSWAAttention": QKV, "GraniteSWAMLP": GATE_UP}),
    "granitemoe": Standard(("GraniteMoeForCausalLM",), {"GraniteMoeAttention": QKV}),
    "granitemoe_swa": Standard(("GraniteMoeSWAForCausalLM",), {"GraniteMoeSWAAttention": QKV}),
    "granitemoehybrid": Standard(
        ("GraniteMoeHybridForCausalLM",), {"GraniteMoeHybridAttention": QKV}, limits=lacks("packed sequences")
    ),
    "granitemoeshared": Standard(("GraniteMoeSharedForCausalLM",), {"GraniteMoeSharedAttention": QKV}),
    "helium": Standard(
        ("HeliumForCausalLM", "HeliumForSequenceClassification", "HeliumForTokenClassification"),
        {"HeliumAttention": QKV, "HeliumMLP": GATE_UP},
    ),
    "hrm_text": Standard(
        ("HrmTextForCausalLM",), {"HrmTextAttention": ("gate_proj q_proj k_proj v_proj",), "HrmTextMLP": GATE_UP}
    ),
    "hunyuan_v1_dense": Standard(
        ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification"),
        {"HunYuanDenseV1Attention": QKV, "HunYuanDenseV1MLP": GATE_UP},
    ),
    "hunyuan_v1_moe": Standard(
        ("HunYuanMoEV1ForCausalLM",),
        {"HunYuanMoEV1Attention": QKV, "HunYuanMoEV1MLP": GATE_UP},
        limits=lacks("router replay"),
    ),
    "hunyuan_vl": Standard(
        ("HunYuanVLForConditionalGeneration",),
        {"HunYuanVLVisionAttention": QKV, "HunYuanVLDenseV1Attention": QKV, "HunYuanVLMLP": GATE_UP},
        limits=lacks("packed sequences", "batch order"),
    ),
    "hy_v3": Standard(
        ("HYV3ForCausalLM",),
        {"HYV3Attention": QKV, "HYV3MLP": GATE_UP},
        config_values={"first_k_dense_replace": (1,), "qk_norm": (True,), "route_norm": (True,)},
    ),
    "hy_v4": Standard(
        ("HYV4ForCausalLM",),
        {"HYV4Attention": ("gate_proj q_a_proj kv_a_proj_with_mqa",), "HYV4MLP": GATE_UP},
        requires="transformers>=5.18",
    ),
    "hyperclovax": Standard(("HyperCLOVAXForCausalLM",), {"HyperCLOVAXAttention": QKV, "HyperCLOVAXMLP": GATE_UP}),
    "hyperclovax_vision_v2": Standard(
        ("HyperCLOVAXVisionV2ForConditionalGeneration",), {}, requires="transformers>=5.18"
    ),
    "idefics": Standard(
        ("IdeficsForVisionText2Text",),
        {
            "vision.IdeficsVisionAttention": QKV,
            "IdeficsAttention": ("k_proj v_proj @ cross_attn", "q_proj k_proj v_proj @ self_attn"),
            "IdeficsMLP": GATE_UP,
        },
        limits=needs_images("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "idefics2": Standard(
        ("Idefics2ForConditionalGeneration",),
        {"Idefics2VisionAttention": QKV, "Idefics2MLP": GATE_UP, "Idefics2PerceiverAttention": ("k_proj v_proj",)},
    ),
    "idefics3": Standard(("Idefics3ForConditionalGeneration",), {"Idefics3VisionAttention": QKV}),
    "inkling": Standard(
        ("InklingForCausalLM",),
        {"InklingAttention": ("q_proj k_proj v_proj r_proj",)},
        limits=lacks("packed sequences", "tensor parallelism"),
    ),
    "inkling2": Standard(
        ("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"),
        {
            "Inkling2SlidingAttention": ("q_proj k_proj v_proj r_proj gate_proj sink_proj",),
            "Inkling2FullAttention": ("q_proj r_proj gate_proj sink_proj",),
            "Inkling2VisionAttention": QKV,
        },
        limits=lacks("packed sequences", "tensor parallelism"),
        requires="transformers>=5.23",
    ),
    "instructblip": Standard(
        ("InstructBlipForConditionalGeneration",),
        {"InstructBlipQFormerMultiHeadAttention": QFORMER},
        limits=needs_images("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "instructblipvideo": Standard(
        ("InstructBlipVideoForConditionalGeneration",),
        {"InstructBlipVideoQFormerMultiHeadAttention": QFORMER},
        limits=needs_images("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "internvl": Standard(("InternVLForConditionalGeneration",), {"InternVLVisionAttention": QKV}),
    "jais2": Standard(("Jais2ForCausalLM",), {"Jais2Attention": QKV}),
    "jamba": Standard(
        ("JambaForCausalLM", "JambaForSequenceClassification"),
        {"JambaMLP": GATE_UP, "JambaAttention": QKV},
        limits=lacks("packed sequences"),
    ),
    "janus": Standard(("JanusForConditionalGeneration",), {"JanusVisionAttention": QKV}),
    "kimi_linear": Standard(
        ("KimiLinearForCausalLM",),
        {
            "KimiLinearDeltaAttention": ("q_proj k_proj v_proj b_proj g_a_proj",),
            "KimiLinearMLP": GATE_UP,
            "KimiLinearAttention": ("q_proj kv_a_proj_with_mqa",),
        },
        limits=lacks("packed sequences"),
        requires="transformers>=5.18",
    ),
    "kolibri1": Standard(
        ("Kolibri1ForCausalLM",), {"Kolibri1Attention": QKV, "Kolibri1MLP": GATE_UP}, requires="transformers>=5.23"
    ),
    "kosmos2": Standard(
        ("Kosmos2ForConditionalGeneration",),
        {
            "Kosmos2VisionAttention": QKV,
            "KosmosTextAttention": ("k_proj v_proj @ x_attn", "q_proj k_proj v_proj @ self_attn"),
        },
        limits=needs_images("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "kosmos2_5": Standard(
        ("Kosmos2_5ForConditionalGeneration",),
        {
            "Kosmos2_5VisionAttention": ("query key value",),
            "Kosmos2_5VisionMlp": ("wi_0 wi_1",),
            "Kosmos2_5TextAttention": ("k_proj v_proj @ x_attn", "k_proj v_proj q_proj @ self_attn"),
        },
        limits=lacks("left padding", "right padding", "packed sequences"),
    ),
    "laguna": Standard(
        ("LagunaForCausalLM",), {"LagunaAttention": ("q_proj k_proj v_proj g_proj",), "LagunaMLP": GATE_UP}
    ),
    "lfm2": Standard(("Lfm2ForCausalLM",), {"Lfm2Attention": QKV, "Lfm2MLP": ("w1 w3",)}),
    "lfm2_moe": Standard(
        ("Lfm2MoeForCausalLM",), {"Lfm2MoeMLP": ("w1 w3",), "Lfm2MoeAttention": QKV}, limits=lacks("packed sequences")
    ),
    "lfm2_vl": Standard(("Lfm2VlForConditionalGeneration",), {}),
    "lfm3": Standard(
        ("Lfm3ForCausalLM",),
        {"Lfm3MLP": ("w1 w3",), "Lfm3Attention": ("q_proj k_proj v_proj g_proj",)},
        limits=lacks("packed sequences"),
        requires="transformers>=5.23",
    ),
    "lfm3_vl": Standard(
        ("Lfm3VlForConditionalGeneration",),
        {"Lfm3VlVisionMLP": ("w1 w3",), "Lfm3VlVisionAttention": QKV},
        limits=lacks("packed sequences"),
        requires="transformers>=5.23",
    ),
    "lighton_ocr": Standard(("LightOnOcrForConditionalGeneration",), {}),
    "llama4": Standard(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        {"Llama4TextAttention": QKV, "Llama4TextMLP": GATE_UP, "Llama4VisionAttention": QKV},
        limits=lacks("left padding", "packed sequences", "tensor parallelism"),
    ),
    "llava": Standard(("LlavaForConditionalGeneration",), {}),
    "llava_next": Standard(("LlavaNextForConditionalGeneration",), {}),
    "llava_next_video": Standard(("LlavaNextVideoForConditionalGeneration",), {}),
    "llava_onevision": Standard(("LlavaOnevisionForConditionalGeneration",), {}),
    "longcat_flash": Standard(
        ("LongcatFlashForCausalLM",),
        {"LongcatFlashMLA": ("q_a_proj kv_a_proj_with_mqa",), "LongcatFlashMLP": GATE_UP},
        config_values={
            "attention_method": ("MLA",),
            "mla_scale_q_lora": (True,),
            "mla_scale_kv_lora": (True,),
            "zero_expert_type": ("identity",),
        },
    ),
    "marian": Standard(
        ("MarianForCausalLM",), {"MarianAttention": QKV}, limits=lacks("left padding", "packed sequences")
    ),
    "mbart": Standard(("MBartForCausalLM",), {"MBartAttention": QKV}, limits=lacks("left padding", "packed sequences")),
    "megatron_bert": Standard(
        ("MegatronBertForCausalLM",),
        {"MegatronBertSelfAttention": ("query key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "mellum": Standard(("MellumForCausalLM",), {"MellumAttention": QKV}),
    "mimo_v2_flash": Standard(("MiMoV2FlashForCausalLM",), {"MiMoV2FlashAttention": QKV, "MiMoV2FlashMLP": GATE_UP}),
    "minicpm3": Standard(
        ("MiniCPM3ForCausalLM", "MiniCPM3ForSequenceClassification"),
        {"MiniCPM3Attention": ("q_a_proj kv_a_proj_with_mqa",), "MiniCPM3MLP": GATE_UP},
    ),
    "minicpm_ocr": Standard(
        ("MiniCPMOcrForConditionalGeneration",),
        {"MiniCPMOcrVisionAttention": QKV},
        limits=lacks("packed sequences"),
        requires="transformers>=5.23",
    ),
    "minicpmv4_6": Standard(
        ("MiniCPMV4_6ForConditionalGeneration",), {"MiniCPMV4_6VisionAttention": QKV}, limits=lacks("packed sequences")
    ),
    "minicpmv4_7": Standard(
        ("MiniCPMV4_7ForConditionalGeneration",),
        {"MiniCPMV4_7VisionAttention": QKV},
        limits=lacks("packed sequences"),
        requires="transformers>=5.18",
    ),
    "minimax": Standard(
        ("MiniMaxForCausalLM", "MiniMaxForSequenceClassification", "MiniMaxForTokenClassification"),
        {
            "MiniMaxAttention": ("attention_qkv: q_proj k_proj v_proj",),
            "MiniMaxLightningAttention": ("qkv_proj output_gate",),
        },
        limits=lacks("packed sequences"),
    ),
    "minimax_m2": Standard(
        ("MiniMaxM2ForCausalLM",),
        {"MiniMaxM2Attention": QKV},
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
        limits=lacks("cached decoding"),
        requires="transformers>=5.23",
    ),
    "mllama": Standard(
        ("MllamaForConditionalGeneration",),
        {
            "MllamaTextSelfAttention": QKV,
            "MllamaTextMLP": GATE_UP,
            "MllamaVisionAttention": QKV,
            "MllamaTextCrossAttention": ("k_proj v_proj",),
        },
    ),
    "modernbert_decoder": Standard(("ModernBertDecoderForCausalLM",), {"ModernBertDecoderAttention": QKV}),
    "molmo2": Standard(
        ("Molmo2ForConditionalGeneration",),
        {
            "Molmo2VisionAttention": ("q_proj k_proj v_proj @ self_attn", "k_proj v_proj @ image_pooling_2d"),
            "Molmo2ImageProjectorMLP": GATE_UP,
            "Molmo2Attention": QKV,
            "Molmo2MLP": ("up_proj gate_proj",),
        },
        requires="transformers>=5.23",
    ),
    "moss_transcribe_diarize": Standard(
        ("MossTranscribeDiarizeForConditionalGeneration",),
        {},
        requires="transformers>=5.23",
    ),
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
        limits=lacks("router replay"),
        requires="transformers>=5.23",
    ),
    "mvp": Standard(("MvpForCausalLM",), {"MvpAttention": QKV}, limits=lacks("left padding", "packed sequences")),
    "nanochat": Standard(("NanoChatForCausalLM",), {"NanoChatAttention": QKV}),
    "nemotron": Standard(
        ("NemotronForCausalLM", "NemotronForSequenceClassification", "NemotronForTokenClassification"),
        {"NemotronAttention": QKV},
    ),
    "nemotron_h_omni": Standard(
        ("NemotronH_Omni_Reasoning_V3",),
        {},
        tiny={
            "audio_token_id": 487,
            "audio_config": {
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 2,
                "projection_hidden_size": 256,
                "projection_bias": False,
                **dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0),
                "initializer_range": 0.2,  # with less, audio is lost among the biases
            },
        },
        limits=lacks("packed sequences"),
        requires="transformers>=5.18",
    ),
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
        limits=lacks("packed sequences"),
    ),
    "olmoe": Standard(("OlmoeForCausalLM",), {"OlmoeAttention": QKV}),
    "opt": Standard(
        ("OPTForCausalLM", "OPTForSequenceClassification"), {"OPTAttention": QKV}, limits=lacks("packed sequences")
    ),
    "ovis2": Standard(("Ovis2ForConditionalGeneration",), {"Ovis2VisionAttention": QKV, "Ovis2MLP": GATE_UP}),
    "paddleocr_vl": Standard(
        ("PaddleOCRVLForConditionalGeneration",),
        {"PaddleOCRVisionAttention": QKV, "PaddleOCRAttention": QKV, "PaddleOCRMLP": GATE_UP},
        mixins={"PaddleOCRVLModel": "FreshPositions", "PaddleOCRTextModel": "PackedTextPositions"},
    ),
    "paligemma": Standard(
        ("PaliGemmaForConditionalGeneration",),
        {},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
        ignored=("num_image_tokens",),  # set on the text model's part, which has no images
    ),
    "parakeet": Standard((), {"ParakeetEncoderAttention": QKV}),
    "pegasus": Standard(
        ("PegasusForCausalLM",), {"PegasusAttention": QKV}, limits=lacks("left padding", "packed sequences")
    ),
    "phi": Standard(
        ("PhiForCausalLM", "PhiForSequenceClassification", "PhiForTokenClassification"), {"PhiAttention": QKV}
    ),
    "phimoe": Standard(("PhimoeForCausalLM",), {"PhimoeAttention": QKV}),
    "pix2struct": Standard(
        ("Pix2StructForConditionalGeneration",),
        {
            "Pix2StructVisionAttention": ("query key value",),
            "Pix2StructVisionMlp": ("wi_0 wi_1",),
            "Pix2StructTextAttention": ("query key value @ self_attention", "key value @ encoder_decoder_attention"),
            "Pix2StructTextDenseGatedActDense": ("wi_0 wi_1",),
        },
        limits=lacks("activation checkpointing")
        | reads_apart("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "pixtral": Standard((), {"PixtralAttention": QKV, "PixtralMLP": GATE_UP}),
    "plbart": Standard(
        ("PLBartForCausalLM",), {"PLBartAttention": QKV}, limits=lacks("left padding", "packed sequences")
    ),
    "prophetnet": Standard(
        ("ProphetNetForCausalLM",),
        {"ProphetNetNgramSelfAttention": ("query_proj key_proj value_proj",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
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
        mixins={"Qwen2_5OmniThinkerTextModel": "PackedTextPositions"},
        limits=lacks("generate"),
    ),
    "qwen2_audio": Standard(("Qwen2AudioForConditionalGeneration",), {}),
    "qwen2_moe": Standard(
        ("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification", "Qwen2MoeForTokenClassification"),
        {"Qwen2MoeAttention": QKV, "Qwen2MoeMLP": GATE_UP},
    ),
    "qwen3_asr": Standard(("Qwen3ASRForConditionalGeneration",), {"Qwen3ASRAudioAttention": QKV}),
    "qwen3_next": Standard(
        ("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification", "Qwen3NextForTokenClassification"),
        {"Qwen3NextGatedDeltaNet": ("in_proj_qkvz in_proj_ba",), "Qwen3NextMLP": GATE_UP, "Qwen3NextAttention": QKV},
        limits=lacks("packed sequences"),
    ),
    "qwen3_omni_moe": Standard(
        ("Qwen3OmniMoeThinkerForConditionalGeneration",),
        {"Qwen3OmniMoeThinkerTextAttention": QKV, "Qwen3OmniMoeAudioAttention": QKV},
        limits=lacks("generate", "tensor parallelism"),
    ),
    "qwen3_vl": Standard(
        ("Qwen3VLForConditionalGeneration",),
        {"Qwen3VLTextAttention": QKV, "Qwen3VLTextMLP": GATE_UP},
        mixins={"Qwen3VLModel": "FreshPositions"},
    ),
    "qwen3_vl_moe": Standard(
        ("Qwen3VLMoeForConditionalGeneration",),
        {"Qwen3VLMoeTextAttention": QKV},
        mixins={"Qwen3VLMoeModel": "FreshPositions"},
        limits=lacks("tensor parallelism"),
    ),
    "qwen4_exp": Standard(
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        {
            "Qwen4ExpTextGatedResidual": ("input_mix_weight_down block_inject_weight",),
            "Qwen4ExpTextGatedDeltaNet": ("in_proj_qkv in_proj_z in_proj_b in_proj_a",),
            "Qwen4ExpTextMLP": GATE_UP,
            "Qwen4ExpTextAttention": QKV,
        },
        mixins={"Qwen4ExpModel": "FreshPositions"},
        limits=lacks("packed sequences"),
    ),
    "radio": Standard((), {"RadioAttention": QKV}),
    "recurrent_gemma": Standard(
        ("RecurrentGemmaForCausalLM",),
        {
            "RecurrentGemmaRecurrentBlock": ("linear_y linear_x",),
            "RecurrentGemmaMlp": GATE_UP,
            "RecurrentGemmaAttention": QKV,
        },
        limits=lacks("left padding", "packed sequences", "cached decoding"),
    ),
    "rembert": Standard(
        ("RemBertForCausalLM",),
        {"RemBertSelfAttention": ("query key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "roberta": Standard(
        ("RobertaForCausalLM",),
        {"RobertaSelfAttention": ("query key value",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "roberta_prelayernorm": Standard(
        ("RobertaPreLayerNormForCausalLM",),
        {"RobertaPreLayerNormSelfAttention": ("query key value",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "roc_bert": Standard(
        ("RoCBertForCausalLM", "RoCBertForSequenceClassification"),
        {"RoCBertSelfAttention": ("query key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
    "roformer": Standard(
        ("RoFormerForCausalLM",),
        {"RoFormerSelfAttention": ("query key value",)},
        limits=lacks("packed sequences", "cached decoding"),
    ),
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
    "trocr": Standard(
        ("TrOCRForCausalLM",),
        {"TrOCRAttention": ("q_proj k_proj v_proj @ self_attn",)},
        limits=lacks("left padding", "packed sequences"),
    ),
    "unlimited_ocr": Standard(
        ("UnlimitedOcrForConditionalGeneration",),
        {"UnlimitedOcrAttention": QKV, "UnlimitedOcrTextAttention": QKV, "UnlimitedOcrTextMLP": GATE_UP},
        requires="transformers>=5.23",
    ),
    "vaultgemma": Standard(("VaultGemmaForCausalLM",), {"VaultGemmaAttention": QKV, "VaultGemmaMLP": GATE_UP}),
    "video_llama_3": Standard(("VideoLlama3ForConditionalGeneration",), {"VideoLlama3VisionAttention": QKV}),
    "video_llava": Standard(("VideoLlavaForConditionalGeneration",), {}, requires="transformers>=5.23"),
    "vipllava": Standard(("VipLlavaForConditionalGeneration",), {}, requires="transformers>=5.23"),
    "vision_encoder_decoder": Standard(
        ("VisionEncoderDecoderModel",),
        {},
        limits=reads_apart("left padding", "right padding", "packed sequences", "cached decoding"),
        requires="transformers>=5.23",
    ),
    "vit": Standard((), {"ViTAttention": QKV}),
    "voxtral": Standard(
        ("VoxtralForConditionalGeneration",),
        {},
        tiny={"audio_token_id": 480, "audio_config": {"intermediate_size": 512}},
    ),
    "xglm": Standard(("XGLMForCausalLM",), {"XGLMAttention": QKV}, limits=lacks("packed sequences")),
    "xlm": Standard(
        ("XLMWithLMHeadModel",),
        {"MultiHeadAttention": ("q_lin k_lin v_lin",)},
        limits=lacks("activation checkpointing", "packed sequences", "cached decoding"),
    ),
    "xlm_roberta": Standard(
        ("XLMRobertaForCausalLM",),
        {"XLMRobertaSelfAttention": ("query key value",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "xlm_roberta_xl": Standard(
        ("XLMRobertaXLForCausalLM",),
        {"XLMRobertaXLSelfAttention": ("query key value",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "xlstm": Standard(
        ("xLSTMForCausalLM",),
        {"xLSTMFeedForward": ("proj_up_gate proj_up",)},
        limits=lacks("left padding", "packed sequences", "cached decoding"),
    ),
    "xmod": Standard(
        ("XmodForCausalLM",),
        {"XmodSelfAttention": ("query key value",)},
        limits=lacks("left padding", "right padding", "packed sequences", "cached decoding"),
    ),
    "youtu": Standard(("YoutuForCausalLM",), {"YoutuAttention": ("q_a_proj kv_a_proj_with_mqa",), "YoutuMLP": GATE_UP}),
}
"""The rows, by package."""
