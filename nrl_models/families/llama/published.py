"""Sizes of published Llama models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Llama-3.2-1B": decoder_sizes(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),
    "Llama-3.1-8B": decoder_sizes(128256, 4096, 14336, 32, 32, 8),
    "Llama-3.1-70B": decoder_sizes(128256, 8192, 28672, 80, 64, 8),
    "Llama-3.1-405B": decoder_sizes(128256, 16384, 53248, 126, 128, 8),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
