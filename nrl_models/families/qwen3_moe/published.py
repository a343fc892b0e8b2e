"""Sizes of published Qwen3-MoE models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Qwen3-30B-A3B": decoder_sizes(
        151936, 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128
    ),
    "Qwen3-235B-A22B": decoder_sizes(
        151936, 4096, 12288, 94, 64, 4, head_dim=128, moe_intermediate_size=1536, num_experts=128
    ),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
