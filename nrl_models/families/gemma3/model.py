"""Gemma 3: q/k norms, five sliding-window layers to each full one; text alone or with a SigLIP vision tower."""

from transformers.models.gemma3 import modeling_gemma3 as hf
from transformers.models.siglip import modeling_siglip as siglip

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, ModelFlag


class Gemma3Attention(CombinedQKV, hf.Gemma3Attention):
    """Attention with one projection for Q, K and V; the norms come after it."""


class Gemma3MLP(CombinedGateUp, hf.Gemma3MLP):
    """GeGLU with one projection for gate and up."""


class SiglipAttention(CombinedQKV, siglip.SiglipAttention):
    """The vision tower's attention with one biased projection for Q, K and V."""


class Gemma3Family(FamilyModel):
    """What every Gemma 3 model shares."""

    rewrites = {
        hf.Gemma3Attention: Gemma3Attention,
        hf.Gemma3MLP: Gemma3MLP,
        siglip.SiglipAttention: SiglipAttention,
    }
    flags = ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK | ModelFlag.VLLM_LOAD_FORMAT_AUTO
    context_parallel = "keeps its attention mask whatever the layer, which torch's ring attention rejects"
    limits = ("Context parallelism: attention keeps its mask, which torch's context parallelism rejects.",)


class Gemma3ForCausalLM(Gemma3Family, hf.Gemma3ForCausalLM):
    """The text model with a language-model head."""


class Gemma3TextForSequenceClassification(Gemma3Family, hf.Gemma3TextForSequenceClassification):
    """The text model with a score for a sequence (reward models)."""


class Gemma3ForConditionalGeneration(Gemma3Family, hf.Gemma3ForConditionalGeneration):
    """The vision-language model."""


class Gemma3ForSequenceClassification(Gemma3Family, hf.Gemma3ForSequenceClassification):
    """The vision-language model with a score for a sequence."""


ModelClass = Gemma3ForCausalLM
