"""Configuration keys passed to mlx-lm: it reads the keys of transformers before version 5."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="needs the extra `mlx`")

from nrl_models.engines.processes.mlx_worker import with_older_keys

pytestmark = pytest.mark.integrations

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0, "rope_scaling": None}),
        (
            {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 7.0}, SLIDING: {"rope_theta": 3.0}}},
            {"rope_theta": 7.0, "rope_local_base_freq": 3.0},
        ),
        # A pattern that contradicts the layer types. transformers uses the layer types.
        ({"layer_types": [SLIDING, FULL] * 2, "sliding_window_pattern": 6}, {"sliding_window_pattern": 2}),
        ({"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}, {"sliding_window_pattern": 3}),
        ({"layer_types": [LINEAR, LINEAR, FULL]}, {"full_attention_interval": 3}),
        ({"layer_types": [SLIDING, FULL], "sliding_window_pattern": "LG"}, {"sliding_window_pattern": "LG"}),
        (
            {"layer_types": [SLIDING, FULL], "per_layer_config": {"01": {"head_dim": 64, "num_key_value_heads": 2}}},
            {"global_head_dim": 64, "num_global_key_value_heads": 2},
        ),
        ({"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16}),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, {"head_dim": 32}),
    ],
)
def test_older_keys_are_added(config: dict[str, Any], older: dict[str, Any]) -> None:
    converted = with_older_keys(config, config)
    assert {name: converted[name] for name in older} == older


def test_irregular_layers_have_no_interval() -> None:
    converted = with_older_keys({"layer_types": [SLIDING, FULL, FULL]}, {})
    assert "sliding_window_pattern" not in converted
    converted = with_older_keys({"layer_types": [FULL, SLIDING], "sliding_window_pattern": 4}, {})
    assert converted["sliding_window_pattern"] == 4


def test_different_full_attention_layers_have_no_global_head_dim() -> None:
    layers = {"layer_types": [SLIDING, FULL] * 2, "per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 32}}}
    assert "global_head_dim" not in with_older_keys(layers, {})


def test_top_level_keys_override_text_config() -> None:
    text = {"vocab_size": 50, "tie_word_embeddings": False}
    config = {"text_config": text, "tie_word_embeddings": True}
    converted = with_older_keys(config, config)
    assert converted["vocab_size"] == 50
    assert converted["text_config"]["tie_word_embeddings"] is True
    assert with_older_keys(config, {"text_config": text})["text_config"]["tie_word_embeddings"] is False


def test_none_is_kept_only_if_set_in_file() -> None:
    config = {"q_lora_rank": None, "head_dim": None, "text_config": {"q_lora_rank": None, "other": None}}
    converted = with_older_keys(config, {"q_lora_rank": None, "text_config": {"q_lora_rank": None}})
    assert "head_dim" not in converted
    assert converted["q_lora_rank"] is None
    assert converted["text_config"] == {"q_lora_rank": None, "rope_scaling": None}
