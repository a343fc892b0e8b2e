"""Sizes of published Gemma 3n models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

TEXT = {
    "Gemma-3n-E2B": decoder_sizes(
        262400, 2048, 8192, 30, 8, 2, num_kv_shared_layers=10, activation_sparsity_pattern=None
    ),
    "Gemma-3n-E4B": decoder_sizes(262400, 2048, 16384, 35, 8, 2, num_kv_shared_layers=15),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""

WITH_IMAGES = {name: {"text_config": values} for name, values in TEXT.items()}
"""The same, with the towers for images and audio that the configuration has by default."""
