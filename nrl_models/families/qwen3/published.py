"""Sizes of published Qwen3 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Qwen3-0.6B": decoder_sizes(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
    "Qwen3-8B": decoder_sizes(151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "Qwen3-32B": decoder_sizes(151936, 5120, 25600, 64, 64, 8, head_dim=128),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
