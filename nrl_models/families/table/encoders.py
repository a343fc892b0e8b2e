"""Encoders that serve as decoders, and the decoders of encoder-decoder models."""

from nrl_models.families.limits import CACHED, LAYOUTS, LEFT, PACKED, READS_APART, lacks
from nrl_models.families.table.row import CAUSAL, CAUSAL_AND_SEQUENCE, QKV, Row

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
    ),
    "bert_generation": Row("BertGeneration", ("Decoder",), {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "bigbird_pegasus": Row("BigBirdPegasus", CAUSAL, {"DecoderAttention": QKV}, lacks(LEFT, PACKED)),
    "blenderbot": Row("Blenderbot", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "blenderbot_small": Row("BlenderbotSmall", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "camembert": Row("Camembert", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "data2vec": Row(
        "Data2VecText", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS), modeling="modeling_data2vec_text"
    ),
    "electra": Row("Electra", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "ernie": Row("Ernie", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "marian": Row("Marian", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "mbart": Row("MBart", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "megatron_bert": Row("MegatronBert", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "mvp": Row("Mvp", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "pegasus": Row("Pegasus", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "plbart": Row("PLBart", CAUSAL, {"Attention": QKV}, lacks(LEFT, PACKED)),
    "prophetnet": Row("ProphetNet", CAUSAL, {"NgramSelfAttention": "query_proj key_proj value_proj"}, lacks(*LAYOUTS)),
    "rembert": Row("RemBert", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "roberta": Row("Roberta", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "roberta_prelayernorm": Row("RobertaPreLayerNorm", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "roc_bert": Row("RoCBert", CAUSAL_AND_SEQUENCE, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "roformer": Row("RoFormer", CAUSAL, {"SelfAttention": "query key value"}, lacks(PACKED, CACHED)),
    "trocr": Row("TrOCR", CAUSAL, {"Attention": "q_proj k_proj v_proj @ self_attn"}, lacks(LEFT, PACKED)),
    "vision_encoder_decoder": Row("", ("VisionEncoderDecoderModel",), {}, READS_APART, since="5.23"),
    "xlm": Row(
        "",
        ("XLMWithLMHeadModel",),
        {"MultiHeadAttention": "q_lin k_lin v_lin"},
        lacks("activation checkpointing", PACKED, CACHED),
    ),
    "xlm_roberta": Row("XLMRoberta", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "xlm_roberta_xl": Row("XLMRobertaXL", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
    "xmod": Row("Xmod", CAUSAL, {"SelfAttention": "query key value"}, lacks(*LAYOUTS)),
}
