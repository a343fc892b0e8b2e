"""DeepSeek-V3 and R1: multi-head latent attention over a mixture of stacked and shared experts."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from nrl_models.common.flags import MTPForm
from nrl_models.common.projections import CombinedGateUp, combine
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class DeepseekV3Family(FamilyModel):
    """Declarations shared by all DeepseekV3 models."""

    rewrites = {
        # Down-projections to the latents. Without query compression, `q_proj` replaces `q_a_proj`.
        hf.DeepseekV3Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        hf.DeepseekV3MLP: CombinedGateUp,
    }
    mtp_form = MTPForm.NUMBERED
    # Keys of published configurations that describe the only supported routing.
    config_values = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
    tensor_parallel = {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }


DeepseekV3ForCausalLM = ModelClass = DeepseekV3Family.head(
    hf.DeepseekV3ForCausalLM,
    published={
        "Moonlight-16B-A3B": decoder_sizes(163840, 2048, 11264, 27, 16, 16)
        | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512}
    },
)
DeepseekV3ForSequenceClassification = DeepseekV3Family.head(hf.DeepseekV3ForSequenceClassification)
DeepseekV3ForTokenClassification = DeepseekV3Family.head(hf.DeepseekV3ForTokenClassification)
