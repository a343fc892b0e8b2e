"""Sizes of published Gemma 2 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

PUBLISHED = {
    "Gemma-2-2B": decoder_sizes(256000, 2304, 9216, 26, 8, 4, head_dim=256),
    "Gemma-2-9B": decoder_sizes(256000, 3584, 14336, 42, 16, 8, head_dim=256),
    "Gemma-2-27B": decoder_sizes(256000, 4608, 36864, 46, 32, 16, head_dim=128),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
