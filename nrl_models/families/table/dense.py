"""Decoders without mixture of experts."""

from nrl_models.families.limits import CACHED, COUNTS_COLUMNS, LEFT, LOOKS_AHEAD, PACKED, RIGHT, lacks
from nrl_models.families.published import decoder_sizes
from nrl_models.families.table.row import GATE_UP, LATENTS, QKV, Row

ROWS: dict[str, Row] = {
    "apertus": Row(
        "ApertusForCausalLM ApertusForTokenClassification",
        {"ApertusAttention": QKV},
        # Its activation has parameters, which see a rank's share of the features.
        tensor_parallel={"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    ),
    "arcee": Row(
        "ArceeForCausalLM ArceeForSequenceClassification ArceeForTokenClassification", {"ArceeAttention": QKV}
    ),
    "biogpt": Row(
        "BioGptForCausalLM BioGptForSequenceClassification BioGptForTokenClassification", {"BioGptAttention": QKV}
    ),
    "bitnet": Row("BitNetForCausalLM", {"BitNetAttention": QKV, "BitNetMLP": GATE_UP}),
    "bloom": Row("BloomForCausalLM", limits=COUNTS_COLUMNS),
    "blt": Row(
        "BltForCausalLM",
        {"BltSelfAttention": QKV, "BltMLP": GATE_UP, "BltCrossAttention": "k_proj v_proj"},
        lacks(LEFT, CACHED),
        mixins={"BltModel": "DecoderByDocument"},
        since="5.13",
    ),
    "codegen": Row("CodeGenForCausalLM"),
    "cohere": Row("CohereForCausalLM", {"CohereAttention": QKV, "CohereMLP": GATE_UP}),
    "cohere2": Row("Cohere2ForCausalLM", {"Cohere2Attention": QKV, "Cohere2MLP": GATE_UP}),
    "cpmant": Row(
        "CpmAntForCausalLM",
        {"CpmAntAttention": "project_q project_k project_v", "CpmAntDenseGatedACT": "w_0 w_1"},
        lacks("activation checkpointing", RIGHT, PACKED, CACHED) | LOOKS_AHEAD,
        since="5.16",
    ),
    "ctrl": Row("CTRLLMHeadModel", {"MultiHeadAttention": "Wq Wk Wv"}, lacks("activation checkpointing"), since="5.13"),
    "cwm": Row("CwmForCausalLM", {"CwmAttention": QKV, "CwmMLP": GATE_UP}),
    "diffllama": Row(
        "DiffLlamaForCausalLM DiffLlamaForSequenceClassification DiffLlamaForTokenClassification",
        {"DiffLlamaAttention": QKV, "DiffLlamaMLP": GATE_UP},
        since="5.13",
    ),
    "dory": Row(
        "DoryForCausalLM", {"DoryAttention": "q_proj k_proj v_proj gate_proj", "DoryMLP": GATE_UP}, since="5.24"
    ),
    "ernie4_5": Row("Ernie4_5ForCausalLM", {"Ernie4_5Attention": QKV, "Ernie4_5MLP": GATE_UP}),
    "exaone4": Row(
        "Exaone4ForCausalLM Exaone4ForSequenceClassification Exaone4ForTokenClassification",
        {"Exaone4Attention": QKV, "Exaone4MLP": GATE_UP},
    ),
    "falcon": Row("FalconForCausalLM", tiny={"ffn_hidden_size": 1024}),  # 4 * hidden_size, as published
    "gemma": Row(
        "GemmaForCausalLM GemmaForSequenceClassification GemmaForTokenClassification",
        {"GemmaAttention": QKV, "GemmaMLP": GATE_UP},
    ),
    "glm": Row("GlmForCausalLM GlmForSequenceClassification GlmForTokenClassification", {"GlmAttention": QKV}),
    "glm4": Row("Glm4ForCausalLM Glm4ForSequenceClassification Glm4ForTokenClassification", {"Glm4Attention": QKV}),
    "gpt2": Row("GPT2LMHeadModel"),
    "gpt_bigcode": Row("GPTBigCodeForCausalLM", tiny={"num_key_value_heads": 1}),  # as `multi_query` requires
    "gpt_neo": Row(
        "GPTNeoForCausalLM GPTNeoForSequenceClassification GPTNeoForTokenClassification",
        {"GPTNeoSelfAttention": QKV},
        COUNTS_COLUMNS,  # local attention
    ),
    "gpt_neox": Row("GPTNeoXForCausalLM"),
    "gpt_neox_japanese": Row("GPTNeoXJapaneseForCausalLM", limits=lacks("activation checkpointing")),
    "gptj": Row("GPTJForCausalLM", {"GPTJAttention": QKV}),
    "granite": Row("GraniteForCausalLM", {"GraniteAttention": QKV, "GraniteMLP": GATE_UP}),
    "granite_swa": Row("GraniteSWAForCausalLM", {"GraniteSWAAttention": QKV, "GraniteSWAMLP": GATE_UP}, since="5.15"),
    "helium": Row(
        "HeliumForCausalLM HeliumForSequenceClassification HeliumForTokenClassification",
        {"HeliumAttention": QKV, "HeliumMLP": GATE_UP},
    ),
    "hrm_text": Row(
        "HrmTextForCausalLM", {"HrmTextAttention": "gate_proj q_proj k_proj v_proj", "HrmTextMLP": GATE_UP}, since="5.9"
    ),
    "hunyuan_v1_dense": Row(
        "HunYuanDenseV1ForCausalLM HunYuanDenseV1ForSequenceClassification",
        {"HunYuanDenseV1Attention": QKV, "HunYuanDenseV1MLP": GATE_UP},
    ),
    "hyperclovax": Row("HyperCLOVAXForCausalLM", {"HyperCLOVAXAttention": QKV, "HyperCLOVAXMLP": GATE_UP}, since="5.9"),
    "jais2": Row("Jais2ForCausalLM", {"Jais2Attention": QKV}),
    "minicpm3": Row(
        "MiniCPM3ForCausalLM MiniCPM3ForSequenceClassification",
        {"MiniCPM3Attention": LATENTS, "MiniCPM3MLP": GATE_UP},
        since="5.13",
    ),
    "ministral": Row(
        "MinistralForCausalLM MinistralForSequenceClassification MinistralForTokenClassification",
        {"MinistralAttention": QKV, "MinistralMLP": GATE_UP},
    ),
    "ministral3": Row(
        "Ministral3ForCausalLM Ministral3ForSequenceClassification Ministral3ForTokenClassification",
        {"Ministral3Attention": QKV, "Ministral3MLP": GATE_UP},
    ),
    "modernbert_decoder": Row("ModernBertDecoderForCausalLM", {"ModernBertDecoderAttention": QKV}),
    "mpt": Row("MptForCausalLM", limits=COUNTS_COLUMNS),
    "nanochat": Row("NanoChatForCausalLM", {"NanoChatAttention": QKV}),
    "nemotron": Row(
        "NemotronForCausalLM NemotronForSequenceClassification NemotronForTokenClassification",
        {"NemotronAttention": QKV},
        since="5.13",
    ),
    "olmo": Row(
        "OlmoForCausalLM OlmoForSequenceClassification",
        {"OlmoAttention": QKV, "OlmoMLP": GATE_UP},
        since={"OlmoForSequenceClassification": "5.6"},
    ),
    "olmo2": Row(
        "Olmo2ForCausalLM Olmo2ForSequenceClassification",
        {"Olmo2Attention": QKV, "Olmo2MLP": GATE_UP},
        since={"Olmo2ForSequenceClassification": "5.6"},
    ),
    "olmo3": Row(
        "Olmo3ForCausalLM Olmo3ForSequenceClassification",
        {"Olmo3Attention": QKV, "Olmo3MLP": GATE_UP},
        since={"Olmo3ForSequenceClassification": "5.6"},
    ),
    "openai": Row(
        "OpenAIGPTLMHeadModel",
        limits=lacks("activation checkpointing", CACHED),
        mixins={"OpenAIGPTModel": "DecoderByDocument"},
    ),
    "opt": Row("OPTForCausalLM OPTForSequenceClassification", {"OPTAttention": QKV}),
    "persimmon": Row("PersimmonForCausalLM"),
    "phi": Row("PhiForCausalLM PhiForSequenceClassification PhiForTokenClassification", {"PhiAttention": QKV}),
    "phi3": Row(
        "Phi3ForCausalLM Phi3ForSequenceClassification Phi3ForTokenClassification",
        published={"Phi-4": decoder_sizes(100352, 5120, 17920, 40, 40, 10)},
    ),
    "seed_oss": Row(
        "SeedOssForCausalLM SeedOssForSequenceClassification SeedOssForTokenClassification",
        {"SeedOssAttention": QKV, "SeedOssMLP": GATE_UP},
    ),
    "smollm3": Row(
        "SmolLM3ForCausalLM SmolLM3ForSequenceClassification SmolLM3ForTokenClassification",
        {"SmolLM3Attention": QKV, "SmolLM3MLP": GATE_UP},
    ),
    "stablelm": Row(
        "StableLmForCausalLM StableLmForSequenceClassification StableLmForTokenClassification",
        {"StableLmAttention": QKV, "StableLmMLP": GATE_UP},
    ),
    "starcoder2": Row(
        "Starcoder2ForCausalLM Starcoder2ForSequenceClassification Starcoder2ForTokenClassification",
        {"Starcoder2Attention": QKV},
    ),
    "vaultgemma": Row("VaultGemmaForCausalLM", {"VaultGemmaAttention": QKV, "VaultGemmaMLP": GATE_UP}),
    "xglm": Row("XGLMForCausalLM", {"XGLMAttention": QKV}),
    "youtu": Row("YoutuForCausalLM", {"YoutuAttention": LATENTS, "YoutuMLP": GATE_UP}),
}
