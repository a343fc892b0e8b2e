"""Sizes of published Phi-3 and Phi-4 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Phi-3-mini-4k": decoder_sizes(32064, 3072, 8192, 32, 32, 32),
    "Phi-4": decoder_sizes(100352, 5120, 17920, 40, 40, 10),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
