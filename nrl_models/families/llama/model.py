"""Llama: grouped-query attention and SwiGLU."""

from transformers.models.llama import modeling_llama as hf

from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class LlamaFamily(FamilyModel):
    """Declarations shared by all Llama models."""

    rewrites = {hf.LlamaAttention: CombinedQKV, hf.LlamaMLP: CombinedGateUp}


LlamaForCausalLM = ModelClass = LlamaFamily.head(
    hf.LlamaForCausalLM,
    published={
        "Llama-3.2-1B": decoder_sizes(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),
        "Llama-3.1-8B": decoder_sizes(128256, 4096, 14336, 32, 32, 8),
        "Llama-3.1-70B": decoder_sizes(128256, 8192, 28672, 80, 64, 8),
        "Llama-3.1-405B": decoder_sizes(128256, 16384, 53248, 126, 128, 8),
    },
)
LlamaForSequenceClassification = LlamaFamily.head(hf.LlamaForSequenceClassification)
LlamaForTokenClassification = LlamaFamily.head(hf.LlamaForTokenClassification)
