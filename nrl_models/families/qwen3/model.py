"""Qwen3: Llama's layers with RMS-normed queries and keys."""

from transformers.models.qwen3 import modeling_qwen3 as hf

from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Qwen3Family(FamilyModel):
    """Declarations shared by all Qwen3 models."""

    rewrites = {hf.Qwen3Attention: CombinedQKV, hf.Qwen3MLP: CombinedGateUp}


Qwen3ForCausalLM = ModelClass = Qwen3Family.head(
    hf.Qwen3ForCausalLM,
    published={
        "Qwen3-0.6B": decoder_sizes(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
        "Qwen3-8B": decoder_sizes(151936, 4096, 12288, 36, 32, 8, head_dim=128),
        "Qwen3-32B": decoder_sizes(151936, 5120, 25600, 64, 64, 8, head_dim=128),
    },
)
Qwen3ForSequenceClassification = Qwen3Family.head(hf.Qwen3ForSequenceClassification)
Qwen3ForTokenClassification = Qwen3Family.head(hf.Qwen3ForTokenClassification)
