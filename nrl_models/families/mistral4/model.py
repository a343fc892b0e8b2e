"""Mistral 4: multi-head latent attention over a mixture of stacked and shared experts."""

from transformers.models.mistral4 import modeling_mistral4 as hf

from nrl_models.common import CombinedGateUp, FamilyModel, combine


class Mistral4Family(FamilyModel):
    """What every Mistral 4 model shares."""

    rewrites = {
        hf.Mistral4Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        hf.Mistral4MLP: CombinedGateUp,
    }


Mistral4ForCausalLM = ModelClass = Mistral4Family.head(hf.Mistral4ForCausalLM)
Mistral4ForSequenceClassification = Mistral4Family.head(hf.Mistral4ForSequenceClassification)
Mistral4ForTokenClassification = Mistral4Family.head(hf.Mistral4ForTokenClassification)
