"""DeepSeek-V3 and R1: multi-head latent attention over a mixture of stacked and shared experts."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from nrl_models.common import CombinedGateUp, FamilyModel, combine


class DeepseekV3Family(FamilyModel):
    """What every DeepseekV3 model shares."""

    rewrites = {
        # Down to the latents of queries and keys; without query compression there is `q_proj` in place of `q_a_proj`.
        hf.DeepseekV3Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        hf.DeepseekV3MLP: CombinedGateUp,
    }
    tiny = {"num_key_value_heads": 8, "head_dim": 16}  # as many as heads, and the rotary part alone


DeepseekV3ForCausalLM = ModelClass = DeepseekV3Family.head(hf.DeepseekV3ForCausalLM)
DeepseekV3ForSequenceClassification = DeepseekV3Family.head(hf.DeepseekV3ForSequenceClassification)
DeepseekV3ForTokenClassification = DeepseekV3Family.head(hf.DeepseekV3ForTokenClassification)
