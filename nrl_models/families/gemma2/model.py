"""Gemma 2: soft-capped logits, norms before and after each block, alternating sliding windows."""

from transformers.models.gemma2 import modeling_gemma2 as hf

from nrl_models.common.flags import ModelFlag
from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Gemma2Family(FamilyModel):
    """Declarations shared by all Gemma2 models."""

    rewrites = {hf.Gemma2Attention: CombinedQKV, hf.Gemma2MLP: CombinedGateUp}
    # Former names of the activation and of the window.
    config_values = {"hidden_act": ("gelu_pytorch_tanh",)}
    ignored_config_keys = ("sliding_window_size",)
    flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO


Gemma2ForCausalLM = ModelClass = Gemma2Family.head(
    hf.Gemma2ForCausalLM,
    published={
        "Gemma-2-9B": decoder_sizes(256000, 3584, 14336, 42, 16, 8, head_dim=256),
        "Gemma-2-27B": decoder_sizes(256000, 4608, 36864, 46, 32, 16, head_dim=128),
    },
)
Gemma2ForSequenceClassification = Gemma2Family.head(hf.Gemma2ForSequenceClassification)
Gemma2ForTokenClassification = Gemma2Family.head(hf.Gemma2ForTokenClassification)
