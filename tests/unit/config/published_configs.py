"""Published configurations, and copies with small sizes. They contain every published key, unusual ones included."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from nrl_models.common.config.walk import own_values
from nrl_models.testing.shrink import Needs, shrink

FOLDER = Path(__file__).with_name("published")
"""A file for each family: `{repository: {"config": ..., "unread": ..., "tiny": ..., "auto": ...}}`, see `Published`."""

STORED_OTHERWISE = ("quantization_config", "compression_config")
"""Keys that describe how weights are stored. Tiny models store unquantized weights."""

DENSE = {"enable_moe_block": False, "num_experts": None, "moe_intermediate_size": None, "top_k_experts": None}
SHARED = DENSE | {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
}
SMALL_TOWERS = {
    "vision_config": {
        "global_head_dim": 64,
        "head_dim": 64,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 16,
        "num_key_value_heads": 12,
        "standardize": False,
        "use_clipped_linears": True,
    },
    "audio_config": {"model_type": "gemma4_audio"},
}
GEMMA4: dict[str, dict[str, dict[str, Any]]] = {
    "google/gemma-4-E2B-it": SMALL_TOWERS
    | {
        "text_config": SHARED
        | {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
            "num_attention_heads": 8,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        }
    },
    "google/gemma-4-E4B-it": SMALL_TOWERS
    | {
        "text_config": SHARED
        | {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
            "num_attention_heads": 8,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        }
    },
    "google/gemma-4-31B-it": {
        "text_config": DENSE
        | {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
        }
    },
}
"""Values of repositories that otherwise have those of `google/gemma-4-26B-A4B`."""


@dataclass(frozen=True)
class Published:
    """The configuration of a hub repository.

    Args:
        config: Its `config.json`.
        unread: Paths of keys that are not read. Loading logs them.
        tiny: Values to override for a tiny model, in addition to the general rules.
        auto: The auto class that loads it.
    """

    config: Mapping[str, Any]
    unread: Collection[str] = ()
    tiny: Mapping[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"


@cache
def published() -> Mapping[str, Published]:
    """Return all published configurations, by repository."""
    files = (json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json")))
    return {name: Published(**entry) for entries in files for name, entry in entries.items()}


def values_of(repository: str) -> dict[str, Any]:
    """Return the content of a repository's `config.json`, which is one of `published` or of `GEMMA4`."""
    parts = GEMMA4.get(repository, {})
    values = dict(published()["google/gemma-4-26B-A4B" if parts else repository].config)
    return values | {key: {**(values[key] or {}), **part} for key, part in parts.items()}


def shrunk(entry: Published, config: PreTrainedConfig) -> dict[str, Any]:
    """Return `entry` for a tiny model: the same keys, with smaller sizes.

    Args:
        entry: The published content.
        config: transformers' configuration object for it.
    """
    tiny = shrink(config, {}, Needs())
    values = _with_sizes(dict(entry.config), config, tiny) | dict(entry.tiny)
    return {key: value for key, value in values.items() if key not in STORED_OTHERWISE}


def _with_sizes(values: dict[str, Any], config: PreTrainedConfig, tiny: PreTrainedConfig) -> dict[str, Any]:
    old, new = own_values(config), own_values(tiny)
    written_as = {own: name for name, own in config.attribute_map.items() if name in values and own not in values}
    for key, value in new.items():
        if isinstance(part := old.get(key), PreTrainedConfig):
            if key in values:
                values[key] = _with_sizes(dict(values[key]), part, value)
            elif "num_hidden_layers" in values and part is config.get_text_config():
                values = _with_sizes(values, part, value)  # its keys are on the same level as the other parts
            else:
                values[key] = {"model_type": part.model_type} | _with_sizes({}, part, value)
        elif key == "rope_parameters":
            values = _with_rope(values, old.get(key), value)
        elif key in old and value != old[key]:
            values[written_as.get(key, key)] = value
    return values


def _with_rope(values: dict[str, Any], old: Any, new: Any) -> dict[str, Any]:
    """Update the rotary parameters in `values` with the new sizes, in the same notation."""
    if old == new:
        return values
    if "rope_parameters" in values or not values.get("rope_scaling"):
        return values | {"rope_parameters": new}
    layers = [inner for inner in new.values() if isinstance(inner, Mapping)] or [new]
    return values | {"rope_scaling": {key: layers[-1].get(key, value) for key, value in values["rope_scaling"].items()}}
