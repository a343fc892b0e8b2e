"""Baichuan 1 and 2: Llama's block with packed projections on the hub; rotary positions (7B) or ALiBi (13B)."""

from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.baichuan import modeling as hf
from nrl_models.families.limits import COUNTS_COLUMNS
from nrl_models.family import FamilyModel


class BaichuanFamily(FamilyModel):
    """Declarations shared by all Baichuan models."""

    rewrites = {hf.BaichuanAttention: CombinedQKV, hf.MistralMLP: CombinedGateUp}
    tiny = {"position_embedding_type": "alibi", "max_position_embeddings": None, "normalize_head": True}


SIZES_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
SIZES_13B = {"hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 40}

BaichuanForCausalLM = ModelClass = BaichuanFamily.head(
    hf.BaichuanForCausalLM,
    limits=COUNTS_COLUMNS,
    published={
        "Baichuan-13B": {"vocab_size": 64000, **SIZES_13B},
        "Baichuan2-7B": {"vocab_size": 125696, "max_position_embeddings": 4096, **SIZES_7B},
        "Baichuan2-13B": {"vocab_size": 125696, **SIZES_13B},
    },
)
BaiChuanForCausalLM = BaichuanFamily.head(  # Baichuan-7B
    hf.BaiChuanForCausalLM,
    tiny={"max_position_embeddings": 256, "normalize_head": False},
    published={"Baichuan-7B": {"vocab_size": 64000, "max_position_embeddings": 4096, **SIZES_7B}},
)
BaichuanForSequenceClassification = BaichuanFamily.head(hf.BaichuanForSequenceClassification)
BaichuanForTokenClassification = BaichuanFamily.head(hf.BaichuanForTokenClassification, limits=COUNTS_COLUMNS)
