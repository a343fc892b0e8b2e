"""Mistral 3 (Small 3.1, Ministral 3): a Pixtral vision tower before Mistral's text model, or another."""

from transformers.models.ministral3 import modeling_ministral3 as ministral3
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mistral3 import modeling_mistral3 as hf
from transformers.models.mistral4 import modeling_mistral4 as mistral4
from transformers.models.pixtral import modeling_pixtral as pixtral

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel, combine
from nrl_models.families import decoder_sizes


class Mistral3Family(FamilyModel):
    """What every Mistral 3 model shares."""

    rewrites = {
        mistral.MistralAttention: CombinedQKV,
        mistral.MistralMLP: CombinedGateUp,
        ministral3.Ministral3Attention: CombinedQKV,
        ministral3.Ministral3MLP: CombinedGateUp,
        mistral4.Mistral4Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        mistral4.Mistral4MLP: CombinedGateUp,
        pixtral.PixtralAttention: CombinedQKV,
        pixtral.PixtralMLP: CombinedGateUp,
    }


Mistral3ForConditionalGeneration = ModelClass = Mistral3Family.head(
    hf.Mistral3ForConditionalGeneration,
    published={
        "Mistral-Small-3.1-24B": {
            "text_config": decoder_sizes(131072, 5120, 32768, 40, 32, 8, head_dim=128, model_type="mistral"),
            "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096}
            | {"num_hidden_layers": 24, "num_attention_heads": 16},
        }
    },
)
