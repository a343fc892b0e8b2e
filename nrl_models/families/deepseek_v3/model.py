"""DeepSeek-V3 and R1: multi-head latent attention over a mixture of stacked and shared experts."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from nrl_models.common import CombinedGateUp, CombinedProjections, FamilyModel


class DeepseekV3Attention(CombinedProjections, hf.DeepseekV3Attention):
    """Latent attention with one projection down to the query's and the keys' latents.

    A model without query compression has `q_proj` in place of `q_a_proj`, reading the same input.
    """

    combined = {"qkv_a_proj": ("q_a_proj", "q_proj", "kv_a_proj_with_mqa")}


class DeepseekV3MLP(CombinedGateUp, hf.DeepseekV3MLP):
    """SwiGLU with one projection for gate and up: dense layers and shared experts."""


class DeepseekV3Family(FamilyModel):
    """What every DeepSeek-V3 model shares."""

    rewrites = {hf.DeepseekV3Attention: DeepseekV3Attention, hf.DeepseekV3MLP: DeepseekV3MLP}
    tensor_parallel = {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
    tiny = {"num_key_value_heads": 8, "head_dim": 16}  # as many as heads, and the rotary part alone


class DeepseekV3ForCausalLM(DeepseekV3Family, hf.DeepseekV3ForCausalLM):
    """DeepSeek-V3 with a language-model head."""


class DeepseekV3ForSequenceClassification(DeepseekV3Family, hf.DeepseekV3ForSequenceClassification):
    """DeepSeek-V3 with a score for a sequence (reward models)."""


class DeepseekV3ForTokenClassification(DeepseekV3Family, hf.DeepseekV3ForTokenClassification):
    """DeepSeek-V3 with a score for each token."""


ModelClass = DeepseekV3ForCausalLM
