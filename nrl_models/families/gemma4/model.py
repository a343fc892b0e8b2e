"""Gemma 4: dense, with experts (26B-A4B), and with layers that attend to earlier ones' keys and values (E2B, E4B)."""

from transformers.models.gemma4 import modeling_gemma4 as hf

from nrl_models.common.forward.kv_sharing import SharedKeyValues
from nrl_models.common.forward.token_types import MULTIMODAL, with_token_types
from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.gemma4.variants import MULTIMODAL_VARIANTS, VARIANTS
from nrl_models.family import FamilyModel


class Gemma4Family(SharedKeyValues, FamilyModel):
    """Declarations shared by all Gemma 4 models."""

    rewrites = {
        # Only Q and K if keys are also used as values (`attention_k_eq_v`), only Q if both are shared.
        hf.Gemma4TextAttention: CombinedQKV,
        hf.Gemma4TextMLP: CombinedGateUp,
    }


Gemma4ForCausalLM = ModelClass = Gemma4Family.head(hf.Gemma4ForCausalLM, variants=VARIANTS)
Gemma4ForConditionalGeneration = Gemma4Family.head(
    hf.Gemma4ForConditionalGeneration,
    forward=with_token_types(
        hf.Gemma4ForConditionalGeneration.forward,
        "mm_token_type_ids",
        MULTIMODAL,
    ),
    # An audio tower exists only with an audio configuration, as in E2B and E4B.
    tiny={"audio_config": {}},
    variants=MULTIMODAL_VARIANTS,
)
