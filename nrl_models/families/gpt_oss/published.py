"""Sizes of published gpt-oss models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "gpt-oss-20b": decoder_sizes(201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32),
    "gpt-oss-120b": decoder_sizes(201088, 2880, 2880, 36, 64, 8, head_dim=64, num_local_experts=128),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
