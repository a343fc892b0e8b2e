"""Gemma 2: soft-capped logits, norms before and after each block, alternating sliding windows."""

from transformers.models.gemma2 import modeling_gemma2 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, ModelFlag


class Gemma2Attention(CombinedQKV, hf.Gemma2Attention):
    """Soft-capped attention with one projection for Q, K and V."""


class Gemma2MLP(CombinedGateUp, hf.Gemma2MLP):
    """GeGLU with one projection for gate and up."""


class Gemma2Family(FamilyModel):
    """What every Gemma2 model shares."""

    rewrites = {hf.Gemma2Attention: Gemma2Attention, hf.Gemma2MLP: Gemma2MLP}
    flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO


class Gemma2ForCausalLM(Gemma2Family, hf.Gemma2ForCausalLM):
    """Gemma2 with a language-model head."""


class Gemma2ForSequenceClassification(Gemma2Family, hf.Gemma2ForSequenceClassification):
    """Gemma2 with a score for a sequence (reward models)."""


class Gemma2ForTokenClassification(Gemma2Family, hf.Gemma2ForTokenClassification):
    """Gemma2 with a score for each token."""


ModelClass = Gemma2ForCausalLM
