"""Qwen3-MoE: Qwen3's attention over a sparse mixture of stacked experts, with dense layers in between."""

from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

from nrl_models.common import CombinedGateUp, CombinedQKV, FamilyModel


class Qwen3MoeAttention(CombinedQKV, hf.Qwen3MoeAttention):
    """Attention with one projection for Q, K and V; the norms come after it."""


class Qwen3MoeMLP(CombinedGateUp, hf.Qwen3MoeMLP):
    """A dense layer's SwiGLU with one projection for gate and up."""


class Qwen3MoeFamily(FamilyModel):
    """What every Qwen3Moe model shares."""

    rewrites = {hf.Qwen3MoeAttention: Qwen3MoeAttention, hf.Qwen3MoeMLP: Qwen3MoeMLP}
    tiny = {"mlp_only_layers": [0]}  # one dense layer, one sparse


class Qwen3MoeForCausalLM(Qwen3MoeFamily, hf.Qwen3MoeForCausalLM):
    """Qwen3Moe with a language-model head."""


class Qwen3MoeForSequenceClassification(Qwen3MoeFamily, hf.Qwen3MoeForSequenceClassification):
    """Qwen3Moe with a score for a sequence (reward models)."""


class Qwen3MoeForTokenClassification(Qwen3MoeFamily, hf.Qwen3MoeForTokenClassification):
    """Qwen3Moe with a score for each token."""


ModelClass = Qwen3MoeForCausalLM
