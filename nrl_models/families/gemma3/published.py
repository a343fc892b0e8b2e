"""Sizes of published Gemma 3 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

TEXT = {"Gemma-3-1B": decoder_sizes(262144, 1152, 6912, 26, 4, 1, head_dim=256)}

_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
WITH_IMAGES = {
    "Gemma-3-4B": {"text_config": decoder_sizes(262208, 2560, 10240, 34, 8, 4, head_dim=256), "vision_config": _TOWER},
    "Gemma-3-27B": {
        "text_config": decoder_sizes(262208, 5376, 21504, 62, 32, 16, head_dim=128),
        "vision_config": _TOWER,
    },
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
