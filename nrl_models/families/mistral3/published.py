"""Sizes of published Mistral 3 models, as their `config.json` gives them."""

from nrl_models.common.configurations import decoder_sizes

_TEXT = decoder_sizes(131072, 5120, 32768, 40, 32, 8, head_dim=128)
_TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
PUBLISHED = {
    "Mistral-Small-3.1-24B": {
        "text_config": {"model_type": "mistral"} | _TEXT,
        "vision_config": {"model_type": "pixtral"} | _TOWER,
    }
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
