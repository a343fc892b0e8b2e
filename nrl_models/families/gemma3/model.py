"""Gemma 3: q/k norms, five sliding-window layers to each full one; text alone or with a SigLIP vision tower."""

from transformers.models.gemma3 import modeling_gemma3 as hf
from transformers.models.siglip import modeling_siglip as siglip

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, ModelFlag


class Gemma3Family(FamilyModel):
    """What every Gemma3 model shares."""

    rewrites = {
        hf.Gemma3Attention: CombinedQKV,
        hf.Gemma3MLP: CombinedGateUp,
        siglip.SiglipAttention: CombinedQKV,
    }
    flags = ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK | ModelFlag.VLLM_LOAD_FORMAT_AUTO
    limits = {"context parallelism": "attention keeps its mask, which torch's context parallelism rejects"}


Gemma3ForCausalLM = ModelClass = Gemma3Family.head(hf.Gemma3ForCausalLM)
Gemma3ForConditionalGeneration = Gemma3Family.head(hf.Gemma3ForConditionalGeneration)
Gemma3ForSequenceClassification = Gemma3Family.head(hf.Gemma3ForSequenceClassification)
Gemma3TextForSequenceClassification = Gemma3Family.head(hf.Gemma3TextForSequenceClassification)
