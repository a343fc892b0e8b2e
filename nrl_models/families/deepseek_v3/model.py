"""DeepSeek-V3 and R1: multi-head latent attention over a mixture of stacked and shared experts."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from nrl_models.common.flags import MTPForm
from nrl_models.common.projections import CombinedGateUp, combine
from nrl_models.families.published import DEEPSEEK_ROUTING, MOONLIGHT
from nrl_models.family import FamilyModel


class DeepseekV3Family(FamilyModel):
    """Declarations shared by all DeepseekV3 models."""

    rewrites = {
        # Down-projections to the latents. Without query compression, `q_proj` replaces `q_a_proj`.
        hf.DeepseekV3Attention: combine(qkv_a_proj=("q_a_proj", "q_proj", "kv_a_proj_with_mqa")),
        hf.DeepseekV3MLP: CombinedGateUp,
    }
    mtp_form = MTPForm.NUMBERED
    config_values = DEEPSEEK_ROUTING
    tensor_parallel = {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }


DeepseekV3ForCausalLM = ModelClass = DeepseekV3Family.head(
    hf.DeepseekV3ForCausalLM, published={"Moonlight-16B-A3B": MOONLIGHT}
)
DeepseekV3ForSequenceClassification = DeepseekV3Family.head(hf.DeepseekV3ForSequenceClassification)
DeepseekV3ForTokenClassification = DeepseekV3Family.head(hf.DeepseekV3ForTokenClassification)
