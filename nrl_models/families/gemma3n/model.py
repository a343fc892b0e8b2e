"""Gemma 3n: AltUp, LAuReL and embeddings for each layer; later layers attend to earlier layers' keys and values."""

from transformers.models.gemma3n import modeling_gemma3n as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel
from nrl_models.common.kv_sharing import SharedKeyValues
from nrl_models.families.gemma3n.published import PUBLISHED


class Gemma3nFamily(SharedKeyValues, FamilyModel):
    """What every Gemma 3n model shares."""

    rewrites = {
        hf.Gemma3nTextAttention: CombinedQKV,  # of queries alone in layers that share keys and values
        hf.Gemma3nTextMLP: CombinedGateUp,
    }
    limits = {
        "images and sound": "Gemma3nForConditionalGeneration loads as transformers' own class: its vision tower is a "
        "timm model of one size only, with which the generated tests have not passed"
    }


Gemma3nForCausalLM = ModelClass = Gemma3nFamily.head(hf.Gemma3nForCausalLM, published=PUBLISHED)
