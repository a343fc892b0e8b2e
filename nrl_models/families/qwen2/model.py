"""Qwen2 and Qwen2.5: Llama's layers with biases on Q, K and V."""

from transformers.models.qwen2 import modeling_qwen2 as hf

from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Qwen2Family(FamilyModel):
    """Declarations shared by all Qwen2 models."""

    rewrites = {hf.Qwen2Attention: CombinedQKV, hf.Qwen2MLP: CombinedGateUp}


Qwen2ForCausalLM = ModelClass = Qwen2Family.head(
    hf.Qwen2ForCausalLM,
    published={
        "Qwen2.5-0.5B": decoder_sizes(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
        "Qwen2.5-7B": decoder_sizes(152064, 3584, 18944, 28, 28, 4),
        "Qwen2.5-72B": decoder_sizes(152064, 8192, 29568, 80, 64, 8),
    },
)
Qwen2ForSequenceClassification = Qwen2Family.head(hf.Qwen2ForSequenceClassification)
Qwen2ForTokenClassification = Qwen2Family.head(hf.Qwen2ForTokenClassification)
