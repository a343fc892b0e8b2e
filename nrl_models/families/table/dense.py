"""Decoders in which every token takes the same weights."""

from nrl_models.families.limits import CACHED, LEFT, PACKED, RIGHT, lacks
from nrl_models.families.published import decoder_sizes
from nrl_models.families.table.row import ALL_HEADS, CAUSAL, CAUSAL_AND_SEQUENCE, GATE_UP, LATENTS, QKV, Row

ROWS: dict[str, Row] = {
    "apertus": Row(
        "Apertus",
        ("ForCausalLM", "ForTokenClassification"),
        {"Attention": QKV},
        # Its activation has parameters, which see a rank's share of the features.
        tensor_parallel={"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    ),
    "arcee": Row("Arcee", ALL_HEADS, {"Attention": QKV}),
    "biogpt": Row("BioGpt", ALL_HEADS, {"Attention": QKV}),
    "bitnet": Row("BitNet", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "bloom": Row("Bloom", CAUSAL),
    "blt": Row(
        "Blt",
        CAUSAL,
        {"SelfAttention": QKV, "MLP": GATE_UP, "CrossAttention": "k_proj v_proj"},
        lacks(LEFT, CACHED),
        mixins={"Model": "DecoderByDocument"},
        since="5.13",
    ),
    "codegen": Row("CodeGen", CAUSAL),
    "cohere": Row("Cohere", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "cohere2": Row("Cohere2", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "cpmant": Row(
        "CpmAnt",
        CAUSAL,
        {"Attention": "project_q project_k project_v", "DenseGatedACT": "w_0 w_1"},
        lacks("activation checkpointing", RIGHT, PACKED, CACHED),
        since="5.16",
    ),
    "ctrl": Row(
        "", ("CTRLLMHeadModel",), {"MultiHeadAttention": "Wq Wk Wv"}, lacks("activation checkpointing"), since="5.13"
    ),
    "cwm": Row("Cwm", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "diffllama": Row("DiffLlama", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}, since="5.13"),
    "dory": Row("Dory", CAUSAL, {"Attention": "q_proj k_proj v_proj gate_proj", "MLP": GATE_UP}, since="5.24"),
    "ernie4_5": Row("Ernie4_5", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "exaone4": Row("Exaone4", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "falcon": Row("Falcon", CAUSAL),
    "gemma": Row("Gemma", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "glm": Row("Glm", ALL_HEADS, {"Attention": QKV}),
    "glm4": Row("Glm4", ALL_HEADS, {"Attention": QKV}),
    "gpt2": Row("GPT2", ("LMHeadModel",)),
    "gpt_bigcode": Row("GPTBigCode", CAUSAL),
    "gpt_neo": Row("GPTNeo", ALL_HEADS, {"SelfAttention": QKV}),
    "gpt_neox": Row("GPTNeoX", CAUSAL),
    "gpt_neox_japanese": Row("GPTNeoXJapanese", CAUSAL, limits=lacks("activation checkpointing")),
    "gptj": Row("GPTJ", CAUSAL, {"Attention": QKV}),
    "granite": Row("Granite", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "granite_swa": Row("GraniteSWA", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, since="5.15"),
    "helium": Row("Helium", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "hrm_text": Row("HrmText", CAUSAL, {"Attention": "gate_proj q_proj k_proj v_proj", "MLP": GATE_UP}, since="5.9"),
    "hunyuan_v1_dense": Row("HunYuanDenseV1", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}),
    "hunyuan_v1_moe": Row("HunYuanMoEV1", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, lacks("router replay")),
    "hyperclovax": Row("HyperCLOVAX", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}, since="5.9"),
    "jais2": Row("Jais2", CAUSAL, {"Attention": QKV}),
    "minicpm3": Row("MiniCPM3", CAUSAL_AND_SEQUENCE, {"Attention": LATENTS, "MLP": GATE_UP}, since="5.13"),
    "ministral": Row("Ministral", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "ministral3": Row("Ministral3", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "modernbert_decoder": Row("ModernBertDecoder", CAUSAL, {"Attention": QKV}),
    "mpt": Row("Mpt", CAUSAL),
    "nanochat": Row("NanoChat", CAUSAL, {"Attention": QKV}),
    "nemotron": Row("Nemotron", ALL_HEADS, {"Attention": QKV}, since="5.13"),
    "olmo": Row(
        "Olmo", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}, since={"ForSequenceClassification": "5.6"}
    ),
    "olmo2": Row(
        "Olmo2", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}, since={"ForSequenceClassification": "5.6"}
    ),
    "olmo3": Row(
        "Olmo3", CAUSAL_AND_SEQUENCE, {"Attention": QKV, "MLP": GATE_UP}, since={"ForSequenceClassification": "5.6"}
    ),
    "openai": Row(
        "OpenAIGPT",
        ("LMHeadModel",),
        limits=lacks("activation checkpointing", CACHED),
        mixins={"Model": "DecoderByDocument"},
    ),
    "opt": Row("OPT", CAUSAL_AND_SEQUENCE, {"Attention": QKV}),
    "persimmon": Row("Persimmon", CAUSAL),
    "phi": Row("Phi", ALL_HEADS, {"Attention": QKV}),
    "phi3": Row("Phi3", ALL_HEADS, published={"Phi-4": decoder_sizes(100352, 5120, 17920, 40, 40, 10)}),
    "seed_oss": Row("SeedOss", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "smollm3": Row("SmolLM3", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "stablelm": Row("StableLm", ALL_HEADS, {"Attention": QKV, "MLP": GATE_UP}),
    "starcoder2": Row("Starcoder2", ALL_HEADS, {"Attention": QKV}),
    "vaultgemma": Row("VaultGemma", CAUSAL, {"Attention": QKV, "MLP": GATE_UP}),
    "xglm": Row("XGLM", CAUSAL, {"Attention": QKV}),
    "youtu": Row("Youtu", CAUSAL, {"Attention": LATENTS, "MLP": GATE_UP}),
}
