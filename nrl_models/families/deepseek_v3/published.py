"""Sizes of published DeepSeek-V3 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "DeepSeek-V3 (671B)": decoder_sizes(
        129280,
        7168,
        18432,
        61,
        128,
        128,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
    ),
    "Moonlight-16B-A3B": decoder_sizes(
        163840,
        2048,
        11264,
        27,
        16,
        16,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512,
    ),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
