"""Encoders that serve as decoders, and the decoders of encoder-decoder models."""

from nrl_models.families.limits import CACHED, LAYOUTS, LEFT, PACKED, READS_APART, lacks
from nrl_models.families.table.row import CAUSAL, CAUSAL_AND_SEQUENCE, QKV, Row

ABSOLUTE = {"position_embedding_type": ("absolute",)}
"""Older configurations name their kind of positions; transformers 5 dropped the others (`relative_key`)."""

ROWS: dict[str, Row] = {
    "bart": Row(
        "Bart",
        CAUSAL,
        {"Attention": "q_proj k_proj v_proj @ self_attn, k_proj v_proj @ encoder_attn"},
        lacks(LEFT, PACKED),
    ),
    "bert": Row(
        "Bert",
        ("LMHeadModel",),
        {"SelfAttention": "query key value", "CrossAttention": "key value"},
        lacks(PACKED, CACHED),
        config_values=ABSOLUTE,
    ),
    "bert_generation": Row(
        "BertGeneration",
        ("Decoder",),
        {"SelfAttention": "query key value"},
        lacks(PACKED, CACHED),
        config_values=ABSOLUTE,
    ),
    "bigbird_pegasus": Row("BigBirdPegasus", CAUSAL, {"DecoderAttention": QKV}, lacks(LEFT, PACKED)),
    "blenderbot": Row("Blenderbot", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "blenderbot_small": Row("BlenderbotSmall", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "camembert": Row(
        "Camembert", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), config_values=ABSOLUTE
    ),
    "data2vec": Row(
        "Data2VecText",
        CAUSAL,
        {"SelfAttention": "query key value"},
        lacks(*LAYOUTS),
        modeling="modeling_data2vec_text",
        config_values=ABSOLUTE,
    ),
    "electra": Row(
        "Electra", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED), config_values=ABSOLUTE
    ),
    "ernie": Row("Ernie", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED), config_values=ABSOLUTE),
    "marian": Row("Marian", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "mbart": Row("MBart", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "megatron_bert": Row(
        "MegatronBert", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED), config_values=ABSOLUTE
    ),
    "mvp": Row("Mvp", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "pegasus": Row("Pegasus", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "plbart": Row("PLBart", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "prophetnet": Row("ProphetNet", CAUSAL, {"NgramSelfAttention": "query_proj key_proj value_proj"}, lacks(*LAYOUTS)),
    "rembert": Row("RemBert", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "roberta": Row("Roberta", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), config_values=ABSOLUTE),
    "roberta_prelayernorm": Row(
        "RobertaPreLayerNorm", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), config_values=ABSOLUTE
    ),
    "roc_bert": Row(
        "RoCBert",
        CAUSAL_AND_SEQUENCE,
        {"SelfAttention": "query key value"},
        lacks(PACKED, CACHED),
        config_values=ABSOLUTE,
    ),
    "roformer": Row("RoFormer", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "trocr": Row("TrOCR", CAUSAL, {"Attention": "q_proj k_proj v_proj @ self_attn"}, lacks(LEFT, PACKED)),
    "vision_encoder_decoder": Row("", ("VisionEncoderDecoderModel",), {}, READS_APART, since="5.23"),
    "xlm": Row(
        "",
        ("XLMWithLMHeadModel",),
        {"MultiHeadAttention": "q_lin k_lin v_lin"},
        lacks("activation checkpointing", PACKED, CACHED),
    ),
    "xlm_roberta": Row(
        "XLMRoberta", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), config_values=ABSOLUTE
    ),
    "xlm_roberta_xl": Row(
        "XLMRobertaXL", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), config_values=ABSOLUTE
    ),
    "xmod": Row("Xmod", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), config_values=ABSOLUTE),
}
