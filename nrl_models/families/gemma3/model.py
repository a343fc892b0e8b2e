"""Gemma 3: q/k norms, five sliding-window layers per full-attention layer; text-only or with a SigLIP vision tower."""

from transformers.models.gemma3 import modeling_gemma3 as hf
from transformers.models.siglip import modeling_siglip as siglip

from nrl_models.common.flags import ModelFlag
from nrl_models.common.forward.token_types import with_token_types
from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Gemma3Family(FamilyModel):
    """Declarations shared by all Gemma3 models."""

    rewrites = {hf.Gemma3Attention: CombinedQKV, hf.Gemma3MLP: CombinedGateUp, siglip.SiglipAttention: CombinedQKV}
    flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO


TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
TOWER |= {"image_size": 896, "patch_size": 14}

Gemma3ForCausalLM = ModelClass = Gemma3Family.head(
    hf.Gemma3ForCausalLM, published={"Gemma-3-1B": decoder_sizes(262144, 1152, 6912, 26, 4, 1, head_dim=256)}
)
Gemma3ForConditionalGeneration = Gemma3Family.head(
    hf.Gemma3ForConditionalGeneration,
    forward=with_token_types(hf.Gemma3ForConditionalGeneration.forward, "token_type_ids", {"image_token_id": 1}),
    published={
        "Gemma-3-4B": {
            "text_config": decoder_sizes(262208, 2560, 10240, 34, 8, 4, head_dim=256),
            "vision_config": TOWER,
        },
        "Gemma-3-27B": {
            "text_config": decoder_sizes(262208, 5376, 21504, 62, 32, 16, head_dim=128),
            "vision_config": TOWER,
        },
    },
)
Gemma3ForSequenceClassification = Gemma3Family.head(hf.Gemma3ForSequenceClassification)
Gemma3TextForSequenceClassification = Gemma3Family.head(hf.Gemma3TextForSequenceClassification)
