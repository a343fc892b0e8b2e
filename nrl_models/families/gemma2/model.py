"""Gemma 2: soft-capped logits, norms before and after each block, alternating sliding windows."""

from transformers.models.gemma2 import modeling_gemma2 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, ModelFlag
from nrl_models.families.gemma2.published import PUBLISHED


class Gemma2Family(FamilyModel):
    """What every Gemma2 model shares."""

    rewrites = {hf.Gemma2Attention: CombinedQKV, hf.Gemma2MLP: CombinedGateUp}
    # The activation under its former name, and the window under another one.
    config_values = {"hidden_act": ("gelu_pytorch_tanh",)}
    ignored_config_keys = ("sliding_window_size",)
    flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO


Gemma2ForCausalLM = ModelClass = Gemma2Family.head(hf.Gemma2ForCausalLM, published=PUBLISHED)
Gemma2ForSequenceClassification = Gemma2Family.head(hf.Gemma2ForSequenceClassification)
Gemma2ForTokenClassification = Gemma2Family.head(hf.Gemma2ForTokenClassification)
