"""Encoders that serve as decoders, and the decoders of encoder-decoder models."""

from typing import Any

from nrl_models.families.limits import CACHED, LEFT, PACKED, READS_APART, RIGHT, lacks
from nrl_models.families.table.row import CAUSAL, CAUSAL_AND_SEQUENCE, QKV, Row

BERT: dict[str, Any] = {
    "layers": {"SelfAttention": "query key value"},
    "mixins": {"Model": "DecoderByDocument"},
    "tiny": {"is_decoder": True},
    # Older configurations name their kind of positions; transformers 5 dropped the others (`relative_key`).
    "config_values": {"position_embedding_type": ("absolute",)},
}
"""BERT and its descendants: whether they serve as a decoder or not, their masks know of no positions."""
COUNTS_FROM_PADDING: dict[str, Any] = BERT | {"limits": lacks(LEFT, RIGHT)}
"""Those whose positions begin behind that of padding, so that positions from zero are not theirs."""
BART: dict[str, Any] = {"limits": lacks(LEFT), "mixins": {"Decoder": "DecoderByDocument"}}
"""Decoders that count positions themselves, from a row's beginning."""

ROWS: dict[str, Row] = {
    "bart": Row(
        "Bart", CAUSAL, {"Attention": "q_proj k_proj v_proj @ self_attn, k_proj v_proj @ encoder_attn"}, **BART
    ),
    "bert": Row("Bert", ("LMHeadModel",), **(BERT | {"layers": BERT["layers"] | {"CrossAttention": "key value"}})),
    "bert_generation": Row("BertGeneration", ("Decoder",), **(BERT | {"mixins": {"Encoder": "DecoderByDocument"}})),
    "bigbird_pegasus": Row("BigBirdPegasus", CAUSAL, {"DecoderAttention": QKV}, **BART),
    "blenderbot": Row("Blenderbot", CAUSAL, {"Attention": QKV}, **BART),
    "blenderbot_small": Row("BlenderbotSmall", CAUSAL, {"Attention": QKV}, **BART),
    "camembert": Row("Camembert", CAUSAL, **COUNTS_FROM_PADDING),
    "data2vec": Row("Data2VecText", CAUSAL, modeling="modeling_data2vec_text", **COUNTS_FROM_PADDING),
    "electra": Row("Electra", CAUSAL, **BERT),
    "ernie": Row("Ernie", CAUSAL, **BERT),
    "marian": Row("Marian", CAUSAL, {"Attention": QKV}, **BART),
    "mbart": Row("MBart", CAUSAL, {"Attention": QKV}, **BART),
    "megatron_bert": Row("MegatronBert", CAUSAL, **BERT),
    "mvp": Row("Mvp", CAUSAL, {"Attention": QKV}, **BART),
    "pegasus": Row("Pegasus", CAUSAL, {"Attention": QKV}, **BART),
    "plbart": Row("PLBart", CAUSAL, {"Attention": QKV}, **BART),
    "prophetnet": Row(
        "ProphetNet",
        CAUSAL,
        {"NgramSelfAttention": "query_proj key_proj value_proj"},
        lacks(LEFT, RIGHT, PACKED, CACHED),
    ),
    "rembert": Row("RemBert", CAUSAL, **BERT),
    "roberta": Row("Roberta", CAUSAL, **COUNTS_FROM_PADDING),
    "roberta_prelayernorm": Row("RobertaPreLayerNorm", CAUSAL, **COUNTS_FROM_PADDING),
    "roc_bert": Row("RoCBert", CAUSAL_AND_SEQUENCE, **BERT),
    "roformer": Row("RoFormer", CAUSAL, **BERT),
    "trocr": Row("TrOCR", CAUSAL, {"Attention": "q_proj k_proj v_proj @ self_attn"}, **BART),
    "vision_encoder_decoder": Row("", ("VisionEncoderDecoderModel",), {}, READS_APART, since="5.23"),
    "xlm": Row(
        "",
        ("XLMWithLMHeadModel",),
        {"MultiHeadAttention": "q_lin k_lin v_lin"},
        lacks("activation checkpointing", CACHED),
        mixins={"XLMModel": "DecoderByDocument"},
    ),
    "xlm_roberta": Row("XLMRoberta", CAUSAL, **COUNTS_FROM_PADDING),
    "xlm_roberta_xl": Row("XLMRobertaXL", CAUSAL, **COUNTS_FROM_PADDING),
    "xmod": Row("Xmod", CAUSAL, **COUNTS_FROM_PADDING),
}
