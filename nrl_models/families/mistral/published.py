"""Sizes of published Mistral models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Mistral-7B-v0.3": decoder_sizes(32768, 4096, 14336, 32, 32, 8),
    "Mistral-Nemo-12B": decoder_sizes(131072, 5120, 14336, 40, 32, 8, head_dim=128),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
