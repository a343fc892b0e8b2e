"""Baichuan 1 and 2: Llama's block with packed projections on the hub; rotary positions (7B) or ALiBi (13B)."""

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel
from nrl_models.families.baichuan import modeling as hf
from nrl_models.families.baichuan import published


class BaichuanFamily(FamilyModel):
    """What every Baichuan model shares."""

    rewrites = {hf.BaichuanAttention: CombinedQKV, hf.BaichuanMLP: CombinedGateUp}
    tiny = {"position_embedding_type": "alibi", "max_position_embeddings": None, "normalize_head": True}


BaichuanForCausalLM = ModelClass = BaichuanFamily.head(hf.BaichuanForCausalLM, published=published.OTHERS)
BaiChuanForCausalLM = BaichuanFamily.head(  # Baichuan-7B
    hf.BaiChuanForCausalLM,
    tiny={"max_position_embeddings": 256, "normalize_head": False},
    published=published.FIRST_7B,
)
BaichuanForSequenceClassification = BaichuanFamily.head(hf.BaichuanForSequenceClassification)
BaichuanForTokenClassification = BaichuanFamily.head(hf.BaichuanForTokenClassification)
