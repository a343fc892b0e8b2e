"""Sizes of published Qwen2-VL models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

_TOWER = {"depth": 32, "embed_dim": 1280, "num_heads": 16}
PUBLISHED = {
    "Qwen2-VL-7B": {
        "text_config": decoder_sizes(152064, 3584, 18944, 28, 28, 4),
        "vision_config": _TOWER | {"hidden_size": 3584},
    },
    "Qwen2-VL-72B": {
        "text_config": decoder_sizes(152064, 8192, 29568, 80, 64, 8),
        "vision_config": _TOWER | {"hidden_size": 8192},
    },
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
