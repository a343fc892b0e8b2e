"""Qwen3-MoE: Qwen3's attention over a sparse mixture of stacked experts, with dense layers in between."""

from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Qwen3MoeFamily(FamilyModel):
    """Declarations shared by all Qwen3Moe models."""

    ignored_config_keys = ("max_window_layers",)  # either no layer or every layer has a window
    rewrites = {hf.Qwen3MoeAttention: CombinedQKV, hf.Qwen3MoeMLP: CombinedGateUp}
    tiny = {"mlp_only_layers": [0]}  # one dense layer, one sparse


Qwen3MoeForCausalLM = ModelClass = Qwen3MoeFamily.head(
    hf.Qwen3MoeForCausalLM,
    published={
        "Qwen3-30B-A3B": decoder_sizes(
            151936, 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128
        ),
        "Qwen3-235B-A22B": decoder_sizes(
            151936, 4096, 12288, 94, 64, 4, head_dim=128, moe_intermediate_size=1536, num_experts=128
        ),
    },
)
Qwen3MoeForSequenceClassification = Qwen3MoeFamily.head(hf.Qwen3MoeForSequenceClassification)
Qwen3MoeForTokenClassification = Qwen3MoeFamily.head(hf.Qwen3MoeForTokenClassification)
