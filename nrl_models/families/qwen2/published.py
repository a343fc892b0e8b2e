"""Sizes of published Qwen2 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Qwen2.5-0.5B": decoder_sizes(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "Qwen2.5-7B": decoder_sizes(152064, 3584, 18944, 28, 28, 4),
    "Qwen2.5-72B": decoder_sizes(152064, 8192, 29568, 80, 64, 8),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
