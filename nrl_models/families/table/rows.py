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

from nrl_models.families import decoder_sizes


@dataclass(frozen=True)
class Standard:
    """One package of transformers.

    Args:
        prefix: how the names of its classes begin; all other arguments leave it out. Empty where they have none in
            common.
        heads: the classes of the package that are served.
        layers: for each layer class of the package its groups, with commas between: the names of linears, as
            `nrl_models.common.projections.combine_groups` takes them; before them, with a colon, what the module that
            computes them is called, where that is not the rule's name; after them, with an `@`, where they are
            combined, if the class reads one input in some places and two in others. A class of another module of the
            package has that module's name before its own (`vision.VisionAttention`).
        limits: as `FamilyModel.limits`; what holds for one architecture only stands under `"Architecture: feature"`.
        mixins: for each other class of the package that is rewritten the mixin of `common.forward.mrope` that goes
            before it.
        tiny: as `FamilyModel.tiny`.
        ignored: as `FamilyModel.ignored_config_keys`.
        since: the version of transformers that the classes need, where this package goes back further.
        modeling: the module that has the classes, where it is not called as the package.
        config_values: as `FamilyModel.config_values`.
        tensor_parallel: as `FamilyModel.tensor_parallel`.
        published: as `FamilyModel.published`, of the first of `heads`.
    """

    prefix: str
    heads: tuple[str, ...]
    layers: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    mixins: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    since: str = ""
    modeling: str = ""
    config_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The full names of the classes that are served."""
        return tuple(self.prefix + head for head in self.heads)

    def module(self, package: str) -> str:
        """The full name of the module that has the classes."""
        return f"transformers.models.{package}.{self.modeling or f'modeling_{package}'}"

    def layer(self, package: str, name: str) -> type | None:
        """A class that the row names; None if the installed transformers has no such class."""
        module, _, own_name = name.rpartition(".")
        found = f"transformers.models.{package}.{module}" if module else self.module(package)
        return getattr(import_module(found), self.prefix + own_name, None)

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


LAYOUTS = LEFT, RIGHT, PACKED, CACHED = ("left padding", "right padding", "packed sequences", "cached decoding")
"""Every other way to give a model a sequence than whole and alone."""
NEEDS_IMAGES = dict.fromkeys(LAYOUTS, "transformers' own model takes no text without an image")
"""The limits of a model that describes images: what is proven with text alone is not proven of it."""
READS_APART = dict.fromkeys(LAYOUTS, "an encoder reads the prompt, and the decoder writes another sequence")
"""The limits of a model with an encoder: what is proven of one sequence, read and written, does not apply."""

STATE_GOES_ON = {PACKED: "upstream's gated delta nets carry their state from a document to the next"}
"""The limits of Qwen3.5."""

CAUSAL = ("ForCausalLM",)
CONDITIONAL = ("ForConditionalGeneration",)
CAUSAL_AND_CONDITIONAL = (*CAUSAL, *CONDITIONAL)
CAUSAL_AND_SEQUENCE = (*CAUSAL, "ForSequenceClassification")
ALL_HEADS = (*CAUSAL_AND_SEQUENCE, "ForTokenClassification")
QKV = "q_proj k_proj v_proj"
LATENTS = "q_a_proj kv_a_proj_with_mqa"
GATE_UP = "gate_proj up_proj"
DELTA_NET = "in_proj: in_proj_qkv in_proj_z in_proj_b in_proj_a"
QFORMER = "query key value @ attention.attention, key value @ crossattention"
STANDARD: dict[str, Standard] = {
    "afmoe": Standard(
        "Afmoe",
        CAUSAL,
        {"Attention": "q_proj k_proj v_proj gate_proj", "MLP": GATE_UP},
        lacks(PACKED),
        config_values={"score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,), "topk_group": (1,)},
    ),
    "apertus": Standard(
        "Apertus",
        ("ForCausalLM", "ForTokenClassification"),
        {"Attention": QKV},
        # Its activation has parameters, which see a rank's share of the features.
        tensor_parallel={"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    ),
    "arcee": Standard("Arcee", ALL_HEADS, {"Attention": QKV}),
    "aria": Standard(
        "Aria",
        ("ForConditionalGeneration", "TextForCausalLM"),
        {"CrossAttention": "k_proj v_proj", "TextAttention": QKV, "SharedExpertsMLP": GATE_UP},
    ),
    "axk1": Standard(
        "AXK1",
        ALL_HEADS,
        {"Attention": LATENTS, "MLP": GATE_UP},
        config_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
    "axk2": Standard(
        "AXK2",
        ALL_HEADS,
        {"Attention": LATENTS, "Indexer": "wk weights_proj", "MLP": GATE_UP},
        lacks(CACHED),
        since="5.18",
    ),
    "aya_vision": Standard("AyaVision", CONDITIONAL),
    "bailing_hybrid": Standard(
        "BailingHybrid",
        CAUSAL,
        {
            "DeltaAttention": "q_proj k_proj v_proj b_proj g_proj",
            "MLP": GATE_UP,
            "Attention": "q_proj kv_a_proj_with_mqa g_proj",
        },
        lacks(PACKED),
        since="5.23",
    ),
    "bamba": Standard("Bamba", CAUSAL, {"MLP": GATE_UP, "Attention": QKV}, lacks(PACKED, CACHED)),
    "bart": Standard(
        "Bart",
        CAUSAL,
        {"Attention": "q_proj k_proj v_proj @ self_attn, k_proj v_proj @ encoder_attn"},
        lacks(LEFT, PACKED),
    ),
    "beam": Standard("Beam", CAUSAL, {"Attention": "q_proj k_proj v_proj gate_proj", "MLP": GATE_UP}, since="5.23"),
    "bert": Standard(
        "Bert",
        ("LMHeadModel",),
        {"SelfAttention": "query key value", "CrossAttention": "key value"},
        lacks(PACKED, CACHED),
    ),
    "bert_generation": Standard(
        "BertGeneration", ("Decoder",), {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)
    ),
    "bigbird_pegasus": Standard("BigBirdPegasus", CAUSAL, {"DecoderAttention": QKV}, lacks(LEFT, PACKED)),
    "biogpt": Standard("BioGpt", ALL_HEADS, {"Attention": QKV}, lacks(PACKED)),
    "bitnet": Standard("BitNet", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "blenderbot": Standard("Blenderbot", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "blenderbot_small": Standard("BlenderbotSmall", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "blip": Standard(
        "Blip",
        CONDITIONAL,
        {"modeling_blip_text.TextSelfAttention": "query key value @ attention, key value @ crossattention"},
        NEEDS_IMAGES,
    ),
    "blip_2": Standard("Blip2", CONDITIONAL, {"QFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES),
    "blt": Standard(
        "Blt",
        CAUSAL,
        {"SelfAttention": QKV, "MLP": GATE_UP, "CrossAttention": "k_proj v_proj"},
        lacks(LEFT, PACKED, CACHED),
    ),
    "camembert": Standard("Camembert", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "chameleon": Standard("Chameleon", CONDITIONAL, {"Attention": QKV, "MLP": GATE_UP}),
    "clip": Standard("CLIP", (), {"Attention": QKV}),
    "cohere": Standard("Cohere", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "cohere2": Standard("Cohere2", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "cohere2_moe": Standard("Cohere2Moe", CAUSAL, {"Attention": QKV}),
    "cohere2_vision": Standard("Cohere2Vision", CONDITIONAL),
    "cohere_compass": Standard(
        "CohereCompass", CAUSAL_AND_CONDITIONAL, {"Attention": QKV, "MLP": GATE_UP}, mixins={"Model": "FreshPositions"}
    ),
    "cosmos3_edge": Standard(
        "Cosmos3Edge",
        CONDITIONAL,
        {"VisionAttention": QKV, "TextAttention": QKV},
        lacks(PACKED),
        mixins={"Model": "FreshPositions"},
        since="5.23",
    ),
    "cosmos3_omni": Standard("Cosmos3Omni", CONDITIONAL, mixins={"Model": "FreshPositions"}),
    "cpmant": Standard(
        "CpmAnt",
        CAUSAL,
        {"Attention": "project_q project_k project_v", "DenseGatedACT": "w_0 w_1"},
        lacks("activation checkpointing", RIGHT, PACKED, CACHED),
    ),
    "ctrl": Standard("", ("CTRLLMHeadModel",), {"MultiHeadAttention": "Wq Wk Wv"}, lacks("activation checkpointing")),
    "cwm": Standard("Cwm", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "data2vec": Standard(
        "Data2VecText", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), modeling="modeling_data2vec_text"
    ),
    "deepseek_ocr2": Standard(
        "DeepseekOcr2",
        CONDITIONAL,
        {"VisionAttention": QKV, "VisionMLP": GATE_UP, "TextAttention": QKV, "TextMLP": GATE_UP},
    ),
    "deepseek_v2": Standard("DeepseekV2", CAUSAL_AND_SEQUENCE, {"Attention": LATENTS, "MLP": GATE_UP}),
    "deepseek_v32": Standard(
        "DeepseekV32",
        CAUSAL,
        {"Attention": LATENTS, "Indexer": "wk weights_proj", "MLP": GATE_UP},
        lacks(CACHED),
        tiny={"n_routed_experts": 4},  # with others, two words score alike in the indexer
        since="5.18",
    ),
    "deepseek_v4": Standard(
        "DeepseekV4",
        CAUSAL,
        {
            "Attention": "q_a_proj kv_proj",
            "HCACompressor": "kv_proj gate_proj",
            "MLP": GATE_UP,
            "CSACompressor": "kv_proj gate_proj",
            "Indexer": "kv_proj gate_proj",
        },
        lacks(LEFT, PACKED),
        tiny={"index_topk": 2},  # of what four words are compressed to each
        since="5.23",
    ),
    "deepseek_vl": Standard("DeepseekVL", CONDITIONAL),
    "deepseek_vl_hybrid": Standard("DeepseekVLHybrid", CONDITIONAL),
    "diffllama": Standard("DiffLlama", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "doge": Standard(
        "Doge", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}, lacks("tensor parallelism"), since="5.18"
    ),
    "dots1": Standard("Dots1", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "dots3_note": Standard(
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
    "electra": Standard("Electra", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "emu3": Standard("Emu3", CAUSAL_AND_CONDITIONAL, {"Attention": QKV, "MLP": GATE_UP, "VQVAEAttentionBlock": QKV}),
    "ernie": Standard("Ernie", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "ernie4_5": Standard("Ernie4_5", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "ernie4_5_moe": Standard("Ernie4_5_Moe", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "ernie4_5_vl_moe": Standard(
        "Ernie4_5_VLMoe",
        CONDITIONAL,
        {"TextAttention": QKV, "MLP": GATE_UP},
        lacks(PACKED),
        mixins={"Model": "FreshPositions"},
    ),
    "evolla": Standard("Evolla", ("ForProteinText2Text",), {"Attention": QKV, "MLP": GATE_UP}, lacks(PACKED)),
    "exaone4": Standard("Exaone4", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "exaone4_5": Standard("Exaone4_5_", CONDITIONAL, {"MLP": GATE_UP}),
    "exaone_moe": Standard("ExaoneMoe", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "falcon_h1": Standard("FalconH1", CAUSAL, {"Attention": QKV, "MLP": "up_proj gate_proj"}, lacks(PACKED)),
    "flex_olmo": Standard("FlexOlmo", CAUSAL, {"Attention": QKV}),
    "flint": Standard("Flint", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, since="5.23"),
    "florence2": Standard("Florence2", CONDITIONAL, {}, READS_APART),
    "gemma": Standard("Gemma", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "gemma4_unified": Standard(
        "Gemma4Unified", CAUSAL_AND_CONDITIONAL, {"TextAttention": QKV, "TextMLP": GATE_UP}, tiny={"audio_config": {}}
    ),
    "git": Standard("Git", CAUSAL, {"VisionAttention": QKV, "SelfAttention": "query key value"}, since="5.23"),
    "glm": Standard("Glm", ALL_HEADS, {"Attention": QKV}),
    "glm4": Standard("Glm4", ALL_HEADS, {"Attention": QKV}),
    "glm46v": Standard("Glm46V", CONDITIONAL, mixins={"Model": "FreshPositions"}),
    "glm4_moe": Standard("Glm4Moe", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "glm4_moe_lite": Standard(
        "Glm4MoeLite",
        CAUSAL,
        {"Attention": LATENTS, "MLP": GATE_UP},
        config_values={"topk_method": ("noaux_tc",), "first_k_dense_replace": (1,), "moe_layer_freq": (1,)},
    ),
    "glm4v": Standard(
        "",
        ("Glm4vForConditionalGeneration",),
        {"Glm4VisionMlp": GATE_UP, "Glm4vVisionPatchMerger": GATE_UP, "Glm4vTextAttention": QKV},
        mixins={"Glm4vModel": "FreshPositions", "Glm4vTextModel": "PackedTextPositions"},
    ),
    "glm4v_moe": Standard(
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
    "glm5_next": Standard(
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
        lacks(PACKED, "tensor parallelism"),
    ),
    "glm_moe_dsa": Standard(
        "GlmMoeDsa",
        CAUSAL,
        {"Attention": LATENTS, "Indexer": "wk weights_proj", "MLP": GATE_UP},
        lacks(CACHED),
        since="5.18",
    ),
    "glm_ocr": Standard(
        "GlmOcr",
        CONDITIONAL,
        {"VisionMlp": GATE_UP, "VisionPatchMerger": GATE_UP, "TextAttention": QKV},
        mixins={"Model": "FreshPositions", "TextModel": "PackedTextPositions"},
    ),
    "glmasr": Standard("GlmAsr", CONDITIONAL),
    "got_ocr2": Standard("GotOcr2", CONDITIONAL),
    "gpt_neo": Standard("GPTNeo", ALL_HEADS, {"SelfAttention": QKV}),
    "gptj": Standard("GPTJ", CAUSAL, {"Attention": QKV}),
    "granite": Standard("Granite", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "granite4_vision": Standard(
        "Granite4Vision", CONDITIONAL, {"TextAttention": QKV, "TextMLP": GATE_UP}, lacks(CACHED), since="5.23"
    ),
    "granite_docling": Standard(
        "GraniteDocling", CONDITIONAL, {"VisionAttention": QKV, "TextAttention": QKV, "TextMLP": GATE_UP}, since="5.23"
    ),
    "granite_speech": Standard(
        "GraniteSpeech", CONDITIONAL, {"ConformerAttention": "to_q to_kv"}, lacks("activation checkpointing")
    ),
    "granite_speech_plus": Standard(
        "GraniteSpeechPlus", CONDITIONAL, {"ConformerAttention": "to_q to_kv"}, lacks("activation checkpointing")
    ),
    "granite_swa": Standard("GraniteSWA", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "granitemoe": Standard("GraniteMoe", CAUSAL, {"Attention": QKV}),
    "granitemoe_swa": Standard("GraniteMoeSWA", CAUSAL, {"Attention": QKV}),
    "granitemoehybrid": Standard("GraniteMoeHybrid", CAUSAL, {"Attention": QKV}, lacks(PACKED)),
    "granitemoeshared": Standard("GraniteMoeShared", CAUSAL, {"Attention": QKV}),
    "helium": Standard("Helium", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "hrm_text": Standard("HrmText", CAUSAL, {"Attention": "gate_proj q_proj k_proj v_proj", "MLP": GATE_UP}),
    "hunyuan_v1_dense": Standard("HunYuanDenseV1", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}),
    "hunyuan_v1_moe": Standard("HunYuanMoEV1", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, lacks("router replay")),
    "hunyuan_vl": Standard(
        "HunYuanVL",
        CONDITIONAL,
        {"VisionAttention": QKV, "DenseV1Attention": QKV, "MLP": GATE_UP},
        lacks(PACKED, "batch order"),
    ),
    "hy_v3": Standard(
        "HYV3",
        CAUSAL,
        {"Attention": QKV, "MLP": GATE_UP},
        config_values={"first_k_dense_replace": (1,), "qk_norm": (True,), "route_norm": (True,)},
    ),
    "hy_v4": Standard(
        "HYV4", CAUSAL, {"Attention": "gate_proj q_a_proj kv_a_proj_with_mqa", "MLP": GATE_UP}, since="5.18"
    ),
    "hyperclovax": Standard("HyperCLOVAX", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "hyperclovax_vision_v2": Standard("HyperCLOVAXVisionV2", CONDITIONAL, since="5.18"),
    "idefics": Standard(
        "Idefics",
        ("ForVisionText2Text",),
        {
            "vision.VisionAttention": QKV,
            "Attention": "k_proj v_proj @ cross_attn, q_proj k_proj v_proj @ self_attn",
            "MLP": GATE_UP,
        },
        NEEDS_IMAGES,
    ),
    "idefics2": Standard(
        "Idefics2", CONDITIONAL, {"VisionAttention": QKV, "MLP": GATE_UP, "PerceiverAttention": "k_proj v_proj"}
    ),
    "idefics3": Standard("Idefics3", CONDITIONAL, {"VisionAttention": QKV}),
    "inkling": Standard(
        "Inkling", CAUSAL, {"Attention": "q_proj k_proj v_proj r_proj"}, lacks(PACKED, "tensor parallelism")
    ),
    "inkling2": Standard(
        "Inkling2",
        CAUSAL_AND_CONDITIONAL,
        {
            "SlidingAttention": "q_proj k_proj v_proj r_proj gate_proj sink_proj",
            "FullAttention": "q_proj r_proj gate_proj sink_proj",
            "VisionAttention": QKV,
        },
        lacks(PACKED, "tensor parallelism"),
        since="5.23",
    ),
    "instructblip": Standard("InstructBlip", CONDITIONAL, {"QFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES),
    "instructblipvideo": Standard(
        "InstructBlipVideo", CONDITIONAL, {"QFormerMultiHeadAttention": QFORMER}, NEEDS_IMAGES
    ),
    "internvl": Standard("InternVL", CONDITIONAL, {"VisionAttention": QKV}),
    "jais2": Standard("Jais2", CAUSAL, {"Attention": QKV}),
    "jamba": Standard("Jamba", CAUSAL_AND_SEQUENCE, {"MLP": GATE_UP, "Attention": QKV}, lacks(PACKED)),
    "janus": Standard("Janus", CONDITIONAL, {"VisionAttention": QKV}),
    "kimi_k25": Standard(
        "Kimi_K25",
        CONDITIONAL,
        {"VisionAttention": QKV},
        config_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
        published={
            "Kimi-K2.5 (1T)": {
                "text_config": decoder_sizes(163840, 7168, 18432, 61, 64, 64, model_type="deepseek_v3")
                | {"moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1}
                | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
                | {"q_lora_rank": 1536, "kv_lora_rank": 512}
            }
        },
    ),
    "kimi_linear": Standard(
        "KimiLinear",
        CAUSAL,
        {
            "DeltaAttention": "q_proj k_proj v_proj b_proj g_a_proj",
            "MLP": GATE_UP,
            "Attention": "q_proj kv_a_proj_with_mqa",
        },
        lacks(PACKED),
        since="5.18",
    ),
    "kolibri1": Standard("Kolibri1", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, since="5.23"),
    "kosmos2": Standard(
        "",
        ("Kosmos2ForConditionalGeneration",),
        {
            "Kosmos2VisionAttention": QKV,
            "KosmosTextAttention": "k_proj v_proj @ x_attn, q_proj k_proj v_proj @ self_attn",
        },
        NEEDS_IMAGES,
    ),
    "kosmos2_5": Standard(
        "Kosmos2_5",
        CONDITIONAL,
        {
            "VisionAttention": "query key value",
            "VisionMlp": "wi_0 wi_1",
            "TextAttention": "k_proj v_proj @ x_attn, k_proj v_proj q_proj @ self_attn",
        },
        lacks(LEFT, RIGHT, PACKED),
    ),
    "laguna": Standard("Laguna", CAUSAL, {"Attention": "q_proj k_proj v_proj g_proj", "MLP": GATE_UP}),
    "lfm2": Standard("Lfm2", CAUSAL, {"Attention": QKV, "MLP": "w1 w3"}),
    "lfm2_moe": Standard("Lfm2Moe", CAUSAL, {"MLP": "w1 w3", "Attention": QKV}, lacks(PACKED)),
    "lfm2_vl": Standard("Lfm2Vl", CONDITIONAL),
    "lfm3": Standard(
        "Lfm3", CAUSAL, {"MLP": "w1 w3", "Attention": "q_proj k_proj v_proj g_proj"}, lacks(PACKED), since="5.23"
    ),
    "lfm3_vl": Standard(
        "Lfm3Vl", CONDITIONAL, {"VisionMLP": "w1 w3", "VisionAttention": QKV}, lacks(PACKED), since="5.23"
    ),
    "lighton_ocr": Standard("LightOnOcr", CONDITIONAL),
    "llama4": Standard(
        "Llama4",
        CAUSAL_AND_CONDITIONAL,
        {"TextAttention": QKV, "TextMLP": GATE_UP, "VisionAttention": QKV},
        lacks(LEFT, PACKED, "tensor parallelism"),
    ),
    "llava": Standard("Llava", CONDITIONAL),
    "llava_next": Standard("LlavaNext", CONDITIONAL),
    "llava_next_video": Standard("LlavaNextVideo", CONDITIONAL),
    "llava_onevision": Standard("LlavaOnevision", CONDITIONAL),
    "longcat_flash": Standard(
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
    "marian": Standard("Marian", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "mbart": Standard("MBart", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "megatron_bert": Standard("MegatronBert", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "mellum": Standard("Mellum", CAUSAL, {"Attention": QKV}),
    "mimo_v2_flash": Standard("MiMoV2Flash", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "minicpm3": Standard("MiniCPM3", CAUSAL_AND_SEQUENCE, {"Attention": LATENTS, "MLP": GATE_UP}),
    "minicpm_ocr": Standard("MiniCPMOcr", CONDITIONAL, {"VisionAttention": QKV}, lacks(PACKED), since="5.23"),
    "minicpmv4_6": Standard("MiniCPMV4_6", CONDITIONAL, {"VisionAttention": QKV}, lacks(PACKED)),
    "minicpmv4_7": Standard("MiniCPMV4_7", CONDITIONAL, {"VisionAttention": QKV}, lacks(PACKED), since="5.18"),
    "minimax": Standard(
        "MiniMax",
        ALL_HEADS,
        {"Attention": "attention_qkv: q_proj k_proj v_proj", "LightningAttention": "qkv_proj output_gate"},
        lacks(PACKED),
    ),
    "minimax_m2": Standard(
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
    "minimax_m3_vl": Standard(
        "",
        ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"),
        {"MiniMaxM3VLVisionAttention": QKV, "MiniMaxM3VLAttention": QKV},
    ),
    "ministral": Standard("Ministral", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "ministral3": Standard("Ministral3", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "mistral_large4": Standard(
        "MistralLarge4",
        CONDITIONAL,
        {"TextAttention": "q_proj kv_a_proj_with_mqa", "TextIndexer": "wk weights_proj", "TextMLP": GATE_UP},
        lacks(CACHED),
        since="5.23",
    ),
    "mistral3": Standard(
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
    "mistral4": Standard(
        "Mistral4",
        ALL_HEADS,
        {"Attention": "qkv_a_proj: q_a_proj q_proj kv_a_proj_with_mqa", "MLP": GATE_UP},
    ),
    "mixtral": Standard(
        "Mixtral",
        ALL_HEADS,
        {"Attention": QKV},
        published={"Mixtral-8x22B": decoder_sizes(32768, 6144, 16384, 56, 48, 8)},
    ),
    "mllama": Standard(
        "Mllama",
        CONDITIONAL,
        {"TextSelfAttention": QKV, "TextMLP": GATE_UP, "VisionAttention": QKV, "TextCrossAttention": "k_proj v_proj"},
    ),
    "modernbert_decoder": Standard("ModernBertDecoder", CAUSAL, {"Attention": QKV}),
    "molmo2": Standard(
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
    "moss_transcribe_diarize": Standard("MossTranscribeDiarize", CONDITIONAL, since="5.23"),
    "muse_glimmer": Standard(
        "MuseGlimmer",
        CONDITIONAL,
        {"VisionAttention": QKV, "TextAttention": "q_proj k_proj v_proj gate_proj", "TextMLP": GATE_UP},
    ),
    "muse_spark": Standard(
        "MuseSpark",
        CONDITIONAL,
        {"VisionAttention": QKV, "TextAttention": "q_proj k_proj v_proj gate_proj"},
        lacks("router replay"),
        since="5.23",
    ),
    "mvp": Standard("Mvp", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "nanochat": Standard("NanoChat", CAUSAL, {"Attention": QKV}),
    "nemotron": Standard("Nemotron", ALL_HEADS, {"Attention": QKV}),
    "nemotron_h_omni": Standard(
        "",
        ("NemotronH_Omni_Reasoning_V3",),
        {},
        lacks(PACKED),
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
        since="5.18",
    ),
    "olmo": Standard("Olmo", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}),
    "olmo2": Standard("Olmo2", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}),
    "olmo3": Standard("Olmo3", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}),
    "olmo_hybrid": Standard(
        "OlmoHybrid",
        CAUSAL,
        {"GatedDeltaNet": "q_proj k_proj v_proj b_proj a_proj g_proj", "MLP": GATE_UP, "Attention": QKV},
        lacks(PACKED),
    ),
    "olmoe": Standard("Olmoe", CAUSAL, {"Attention": QKV}),
    "opt": Standard("OPT", CAUSAL_AND_SEQUENCE, {"Attention": QKV}, lacks(PACKED)),
    "ovis2": Standard("Ovis2", CONDITIONAL, {"VisionAttention": QKV, "MLP": GATE_UP}),
    "paddleocr_vl": Standard(
        "PaddleOCR",
        ("VLForConditionalGeneration",),
        {"VisionAttention": QKV, "Attention": QKV, "MLP": GATE_UP},
        mixins={"VLModel": "FreshPositions", "TextModel": "PackedTextPositions"},
    ),
    "paligemma": Standard(
        "PaliGemma",
        CONDITIONAL,
        {},
        lacks(*LAYOUTS),
        ignored=("num_image_tokens",),  # set on the text model's part, which has no images
    ),
    "parakeet": Standard("Parakeet", (), {"EncoderAttention": QKV}),
    "pegasus": Standard("Pegasus", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "phi": Standard("Phi", ALL_HEADS, {"Attention": QKV}),
    # On the hub QKV and gate-up are packed already.
    "phi3": Standard("Phi3", ALL_HEADS, published={"Phi-4": decoder_sizes(100352, 5120, 17920, 40, 40, 10)}),
    "phimoe": Standard("Phimoe", CAUSAL, {"Attention": QKV}),
    "pix2struct": Standard(
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
    "pixtral": Standard("Pixtral", (), {"Attention": QKV, "MLP": GATE_UP}),
    "plbart": Standard("PLBart", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "prophetnet": Standard(
        "ProphetNet", CAUSAL, {"NgramSelfAttention": "query_proj key_proj value_proj"}, lacks(*LAYOUTS)
    ),
    "qianfan_ocr": Standard("QianfanOCR", CONDITIONAL, {"VisionAttention": QKV}),
    "qwen2_5_omni": Standard(
        "",
        ("Qwen2_5OmniThinkerForConditionalGeneration",),
        {
            "Qwen2_5OmniVisionAttention": "q k v",
            "Qwen2_5OmniMLP": GATE_UP,
            "Qwen2_5OmniAttention": QKV,
            "Qwen2MLP": GATE_UP,
        },
        lacks("generate"),
        mixins={"Qwen2_5OmniThinkerTextModel": "PackedTextPositions"},
    ),
    "qwen2_audio": Standard("Qwen2Audio", CONDITIONAL),
    "qwen2_moe": Standard("Qwen2Moe", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "qwen3_asr": Standard("Qwen3ASR", CONDITIONAL, {"AudioAttention": QKV}),
    "qwen3_5": Standard(
        "Qwen3_5",
        (*CAUSAL_AND_CONDITIONAL, *ALL_HEADS[1:], "TextForSequenceClassification"),
        {"GatedDeltaNet": DELTA_NET, "Attention": QKV, "MLP": GATE_UP},
        STATE_GOES_ON,
        {"Model": "FreshPositions"},
    ),
    "qwen3_5_moe": Standard(
        "Qwen3_5Moe",
        CAUSAL_AND_CONDITIONAL,
        {"GatedDeltaNet": DELTA_NET, "Attention": QKV, "MLP": GATE_UP},
        STATE_GOES_ON,
        {"Model": "FreshPositions"},
    ),
    "qwen3_next": Standard(
        "Qwen3Next",
        ALL_HEADS,
        {"GatedDeltaNet": "in_proj_qkvz in_proj_ba", "MLP": GATE_UP, "Attention": QKV},
        lacks(PACKED),
    ),
    "qwen3_omni_moe": Standard(
        "Qwen3OmniMoe",
        ("ThinkerForConditionalGeneration",),
        {"ThinkerTextAttention": QKV, "AudioAttention": QKV},
        lacks("generate", "tensor parallelism"),
    ),
    "qwen3_vl": Standard(
        "Qwen3VL", CONDITIONAL, {"TextAttention": QKV, "TextMLP": GATE_UP}, mixins={"Model": "FreshPositions"}
    ),
    "qwen3_vl_moe": Standard(
        "Qwen3VLMoe",
        CONDITIONAL,
        {"TextAttention": QKV},
        lacks("tensor parallelism"),
        mixins={"Model": "FreshPositions"},
    ),
    "qwen4_exp": Standard(
        "Qwen4Exp",
        CAUSAL_AND_CONDITIONAL,
        {
            "TextGatedResidual": "input_mix_weight_down block_inject_weight",
            "TextGatedDeltaNet": "in_proj_qkv in_proj_z in_proj_b in_proj_a",
            "TextMLP": GATE_UP,
            "TextAttention": QKV,
        },
        lacks(PACKED),
        mixins={"Model": "FreshPositions"},
    ),
    "radio": Standard("Radio", (), {"Attention": QKV}),
    "recurrent_gemma": Standard(
        "RecurrentGemma",
        CAUSAL,
        {"RecurrentBlock": "linear_y linear_x", "Mlp": GATE_UP, "Attention": QKV},
        lacks(LEFT, PACKED, CACHED),
    ),
    "rembert": Standard("RemBert", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "roberta": Standard("Roberta", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "roberta_prelayernorm": Standard(
        "RobertaPreLayerNorm", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)
    ),
    "roc_bert": Standard("RoCBert", CAUSAL_AND_SEQUENCE, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "roformer": Standard("RoFormer", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "seed_oss": Standard("SeedOss", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "siglip": Standard("Siglip", (), {"Attention": QKV}),
    "siglip2": Standard("Siglip2", (), {"Attention": QKV}),
    "smollm3": Standard("SmolLM3", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "smolvlm": Standard("SmolVLM", CONDITIONAL, {"VisionAttention": QKV}),
    "solar_open": Standard("SolarOpen", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "stablelm": Standard("StableLm", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "starcoder2": Standard("Starcoder2", ALL_HEADS, {"Attention": QKV}),
    "step3p7": Standard(
        "Step3p7", CONDITIONAL, {"VisionAttention": QKV, "Attention": "q_proj k_proj v_proj g_proj", "MLP": GATE_UP}
    ),
    "trocr": Standard("TrOCR", CAUSAL, {"Attention": "q_proj k_proj v_proj @ self_attn"}, lacks(LEFT, PACKED)),
    "unlimited_ocr": Standard(
        "UnlimitedOcr", CONDITIONAL, {"Attention": QKV, "TextAttention": QKV, "TextMLP": GATE_UP}, since="5.23"
    ),
    "vaultgemma": Standard("VaultGemma", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "video_llama_3": Standard("VideoLlama3", CONDITIONAL, {"VisionAttention": QKV}),
    "video_llava": Standard("VideoLlava", CONDITIONAL, since="5.23"),
    "vipllava": Standard("VipLlava", CONDITIONAL, since="5.23"),
    "vision_encoder_decoder": Standard("", ("VisionEncoderDecoderModel",), {}, READS_APART, since="5.23"),
    "vit": Standard("ViT", (), {"Attention": QKV}),
    "voxtral": Standard(
        "Voxtral", CONDITIONAL, tiny={"audio_token_id": 480, "audio_config": {"intermediate_size": 512}}
    ),
    "xglm": Standard("XGLM", CAUSAL, {"Attention": QKV}, lacks(PACKED)),
    "xlm": Standard(
        "",
        ("XLMWithLMHeadModel",),
        {"MultiHeadAttention": "q_lin k_lin v_lin"},
        lacks("activation checkpointing", PACKED, CACHED),
    ),
    "xlm_roberta": Standard("XLMRoberta", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "xlm_roberta_xl": Standard("XLMRobertaXL", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "xlstm": Standard("xLSTM", CAUSAL, {"FeedForward": "proj_up_gate proj_up"}, lacks(LEFT, PACKED, CACHED)),
    "xmod": Standard("Xmod", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "youtu": Standard("Youtu", CAUSAL, {"Attention": LATENTS, "MLP": GATE_UP}),
}
"""The rows, by package."""
