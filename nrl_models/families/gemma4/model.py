"""Gemma 4: dense, with experts (26B-A4B), and with layers that attend to earlier ones' keys and values (E2B, E4B)."""

from transformers.models.gemma4 import modeling_gemma4 as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Gemma4Family(FamilyModel):
    """What every Gemma 4 model shares."""

    rewrites = {
        # Without values where keys are the values (`attention_k_eq_v`), of queries alone where both are shared.
        hf.Gemma4TextAttention: CombinedQKV,
        hf.Gemma4TextMLP: CombinedGateUp,
    }


Gemma4ForCausalLM = ModelClass = Gemma4Family.head(hf.Gemma4ForCausalLM)
Gemma4ForConditionalGeneration = Gemma4Family.head(hf.Gemma4ForConditionalGeneration)
