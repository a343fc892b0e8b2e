"""Encoders that serve as decoders, and the decoders of encoder-decoder models."""

from collections.abc import Mapping

from nrl_models.families.limits import CACHED, LEFT, PACKED, READS_APART, RIGHT, lacks
from nrl_models.families.table.row import QKV, Row


def _bert(
    heads: str,
    model: str,
    layers: Mapping[str, str],
    limits: Mapping[str, str] | None = None,
    modeling: str = "",
) -> Row:
    """Return the row of BERT or a related model. Its masks ignore positions, also when it is used as an encoder."""
    return Row(
        heads,
        layers,
        limits or {},
        mixins={model: "DecoderByDocument"},
        tiny={"is_decoder": True},
        # Older configurations have a kind of positions; transformers 5 removed all but this one (`relative_key`, ...).
        config_values={"position_embedding_type": ("absolute",)},
        modeling=modeling,
    )


def _bart(heads: str, decoder: str, layers: Mapping[str, str]) -> Row:
    """Return the row of a decoder that computes positions from the start of a sequence, so left padding shifts them."""
    return Row(heads, layers, lacks(LEFT), mixins={decoder: "DecoderByDocument"})


BERT = "query key value"
COUNTS_FROM_PADDING = lacks(LEFT, RIGHT)
"""Limits of models whose positions start after the padding position, instead of at zero."""

ROWS: dict[str, Row] = {
    "bart": _bart(
        "BartForCausalLM",
        "BartDecoder",
        {"BartAttention": "q_proj k_proj v_proj @ self_attn, k_proj v_proj @ encoder_attn"},
    ),
    "bert": _bert("BertLMHeadModel", "BertModel", {"BertSelfAttention": BERT, "BertCrossAttention": "key value"}),
    "bert_generation": _bert("BertGenerationDecoder", "BertGenerationEncoder", {"BertGenerationSelfAttention": BERT}),
    "bigbird_pegasus": _bart(
        "BigBirdPegasusForCausalLM", "BigBirdPegasusDecoder", {"BigBirdPegasusDecoderAttention": QKV}
    ),
    "blenderbot": _bart("BlenderbotForCausalLM", "BlenderbotDecoder", {"BlenderbotAttention": QKV}),
    "blenderbot_small": _bart(
        "BlenderbotSmallForCausalLM", "BlenderbotSmallDecoder", {"BlenderbotSmallAttention": QKV}
    ),
    "camembert": _bert("CamembertForCausalLM", "CamembertModel", {"CamembertSelfAttention": BERT}, COUNTS_FROM_PADDING),
    "data2vec": _bert(
        "Data2VecTextForCausalLM",
        "Data2VecTextModel",
        {"Data2VecTextSelfAttention": BERT},
        COUNTS_FROM_PADDING,
        modeling="modeling_data2vec_text",
    ),
    "electra": _bert("ElectraForCausalLM", "ElectraModel", {"ElectraSelfAttention": BERT}),
    "ernie": _bert("ErnieForCausalLM", "ErnieModel", {"ErnieSelfAttention": BERT}),
    "marian": _bart("MarianForCausalLM", "MarianDecoder", {"MarianAttention": QKV}),
    "mbart": _bart("MBartForCausalLM", "MBartDecoder", {"MBartAttention": QKV}),
    "megatron_bert": _bert("MegatronBertForCausalLM", "MegatronBertModel", {"MegatronBertSelfAttention": BERT}),
    "mvp": _bart("MvpForCausalLM", "MvpDecoder", {"MvpAttention": QKV}),
    "pegasus": _bart("PegasusForCausalLM", "PegasusDecoder", {"PegasusAttention": QKV}),
    "plbart": _bart("PLBartForCausalLM", "PLBartDecoder", {"PLBartAttention": QKV}),
    "prophetnet": Row(
        "ProphetNetForCausalLM",
        {"ProphetNetNgramSelfAttention": "query_proj key_proj value_proj"},
        lacks(LEFT, RIGHT, PACKED, CACHED),
    ),
    "rembert": _bert("RemBertForCausalLM", "RemBertModel", {"RemBertSelfAttention": BERT}),
    "roberta": _bert("RobertaForCausalLM", "RobertaModel", {"RobertaSelfAttention": BERT}, COUNTS_FROM_PADDING),
    "roberta_prelayernorm": _bert(
        "RobertaPreLayerNormForCausalLM",
        "RobertaPreLayerNormModel",
        {"RobertaPreLayerNormSelfAttention": BERT},
        COUNTS_FROM_PADDING,
    ),
    "roc_bert": _bert(
        "RoCBertForCausalLM RoCBertForSequenceClassification", "RoCBertModel", {"RoCBertSelfAttention": BERT}
    ),
    "roformer": _bert("RoFormerForCausalLM", "RoFormerModel", {"RoFormerSelfAttention": BERT}),
    "trocr": _bart("TrOCRForCausalLM", "TrOCRDecoder", {"TrOCRAttention": "q_proj k_proj v_proj @ self_attn"}),
    "vision_encoder_decoder": Row("VisionEncoderDecoderModel", {}, READS_APART, since="5.23"),
    "xlm": Row(
        "XLMWithLMHeadModel",
        {"MultiHeadAttention": "q_lin k_lin v_lin"},
        lacks("activation checkpointing", CACHED, LEFT),
        mixins={"XLMModel": "DecoderByDocument"},
        tiny={"causal": True},
    ),
    "xlm_roberta": _bert(
        "XLMRobertaForCausalLM", "XLMRobertaModel", {"XLMRobertaSelfAttention": BERT}, COUNTS_FROM_PADDING
    ),
    "xlm_roberta_xl": _bert(
        "XLMRobertaXLForCausalLM", "XLMRobertaXLModel", {"XLMRobertaXLSelfAttention": BERT}, COUNTS_FROM_PADDING
    ),
    "xmod": _bert("XmodForCausalLM", "XmodModel", {"XmodSelfAttention": BERT}, COUNTS_FROM_PADDING),
}
