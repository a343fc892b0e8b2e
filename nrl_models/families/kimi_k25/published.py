"""Sizes of published Kimi K2.5 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

_TEXT = decoder_sizes(
    163840,
    7168,
    18432,
    61,
    64,
    64,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
)
PUBLISHED = {"Kimi-K2.5 (1T)": {"text_config": {"model_type": "deepseek_v3"} | _TEXT}}
"""Values, by configuration key, of published models; what the class has by default is left out."""
