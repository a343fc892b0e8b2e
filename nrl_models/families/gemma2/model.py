"""Gemma 2: soft-capped logits, norms before and after each block, alternating sliding windows."""

from transformers.models.gemma2 import modeling_gemma2 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, ModelFlag


class Gemma2Family(FamilyModel):
    """What every Gemma2 model shares."""

    rewrites = {hf.Gemma2Attention: CombinedQKV, hf.Gemma2MLP: CombinedGateUp}
    flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO


Gemma2ForCausalLM = ModelClass = Gemma2Family.head(hf.Gemma2ForCausalLM)
Gemma2ForSequenceClassification = Gemma2Family.head(hf.Gemma2ForSequenceClassification)
Gemma2ForTokenClassification = Gemma2Family.head(hf.Gemma2ForTokenClassification)
