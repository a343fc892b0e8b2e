"""Sizes of published Mixtral models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Mixtral-8x7B": decoder_sizes(32000, 4096, 14336, 32, 32, 8),
    "Mixtral-8x22B": decoder_sizes(32768, 6144, 16384, 56, 48, 8),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
