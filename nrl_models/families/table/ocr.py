"""Models that read text in images of documents."""

from nrl_models.families.limits import (
    LEFT,
    OTHER_MASKS,
    READS_APART,
    RIGHT,
    lacks,
)
from nrl_models.families.table.row import GATE_UP, QKV, Row

ROWS: dict[str, Row] = {
    "deepseek_ocr2": Row(
        "DeepseekOcr2ForConditionalGeneration",
        {
            "DeepseekOcr2VisionAttention": QKV,
            "DeepseekOcr2VisionMLP": GATE_UP,
            "DeepseekOcr2TextAttention": QKV,
            "DeepseekOcr2TextMLP": GATE_UP,
        },
        since="5.10",
    ),
    "glm_ocr": Row(
        "GlmOcrForConditionalGeneration",
        {"GlmOcrVisionMlp": GATE_UP, "GlmOcrVisionPatchMerger": GATE_UP, "GlmOcrTextAttention": QKV},
        mixins={"GlmOcrModel": "FreshPositions", "GlmOcrTextModel": "PackedTextPositions"},
    ),
    "got_ocr2": Row("GotOcr2ForConditionalGeneration"),
    "granite_docling": Row(
        "GraniteDoclingForConditionalGeneration",
        {"GraniteDoclingVisionAttention": QKV, "GraniteDoclingTextAttention": QKV, "GraniteDoclingTextMLP": GATE_UP},
        since="5.23",
    ),
    "kosmos2_5": Row(
        "Kosmos2_5ForConditionalGeneration",
        {
            "Kosmos2_5VisionAttention": "query key value",
            "Kosmos2_5VisionMlp": "wi_0 wi_1",
            "Kosmos2_5TextAttention": "k_proj v_proj @ x_attn, k_proj v_proj q_proj @ self_attn",
        },
        lacks(LEFT, RIGHT),
        mixins={"Kosmos2_5TextTransformer": "DecoderByDocument"},
        since="5.10",
    ),
    "lighton_ocr": Row("LightOnOcrForConditionalGeneration"),
    "minicpm_ocr": Row("MiniCPMOcrForConditionalGeneration", {"MiniCPMOcrVisionAttention": QKV}, since="5.23"),
    "paddleocr_vl": Row(
        "PaddleOCRVLForConditionalGeneration",
        {"PaddleOCRVisionAttention": QKV, "PaddleOCRAttention": QKV, "PaddleOCRMLP": GATE_UP},
        mixins={"PaddleOCRVLModel": "FreshPositions", "PaddleOCRTextModel": "PackedTextPositions"},
    ),
    "pix2struct": Row(
        "Pix2StructForConditionalGeneration",
        {
            "Pix2StructVisionAttention": "query key value",
            "Pix2StructVisionMlp": "wi_0 wi_1",
            "Pix2StructTextAttention": "query key value @ self_attention, key value @ encoder_decoder_attention",
            "Pix2StructTextDenseGatedActDense": "wi_0 wi_1",
        },
        lacks("activation checkpointing") | READS_APART,
    ),
    "qianfan_ocr": Row("QianfanOCRForConditionalGeneration", {"QianfanOCRVisionAttention": QKV}, since="5.6"),
    "unlimited_ocr": Row(
        "UnlimitedOcrForConditionalGeneration",
        {"UnlimitedOcrAttention": QKV, "UnlimitedOcrTextAttention": QKV, "UnlimitedOcrTextMLP": GATE_UP},
        OTHER_MASKS,
        since="5.23",
    ),
}
