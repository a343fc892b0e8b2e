"""Tiny configurations keep the distinctive features of a family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)
from versions import since

from nrl_models import families, registry
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

ARCHITECTURES = [name for facts in families.folders().values() for name in facts.architectures]
"""Families with a separate folder. Families of the table are tested only by their generated tests."""


LARGER = {"Gemma3nForConditionalGeneration": 20_000_000}
"""Maximum number of parameters of models with a timm tower, whose arguments cannot make it as small."""


@pytest.fixture(params=ARCHITECTURES)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    if unmet := registry.unmet_requirement(request.param):
        pytest.skip(f"needs {unmet}")
    return FamilyCase(registry.model_class(request.param))


def parts_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and its nested configurations."""
    inside = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for config_inside in inside for part in parts_of(config_inside))]


def test_tiny_config_has_test_size(case: FamilyCase) -> None:
    config = case.config
    text = config.get_text_config()
    assert (text.hidden_size, text.num_attention_heads) == (256, 8)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in case.reference_class(config).parameters())
    assert 500_000 < parameters < LARGER.get(case.architecture, 10_000_000)
    assert case.config is not config
    assert case.config.to_dict() == config.to_dict()


def test_tiny_config_has_no_dropout(case: FamilyCase) -> None:
    for part in parts_of(case.config):
        assert all(
            value in (0.0, None) for name, value in part.to_dict().items() if "dropout" in name or "pdrop" in name
        )
        assert part.classifier_dropout == 0.0


def test_default_dropout_is_disabled() -> None:
    default, config = GPT2Config(), tiny_config(GPT2Config)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert getattr(default, name) == 0.1
        assert getattr(config, name) == 0.0


@pytest.mark.long
def test_tiny_config_has_every_layer_type(case: FamilyCase) -> None:
    kinds = set(getattr(case.full_configs["default"].get_text_config(), "layer_types", None) or ())
    text = case.config.get_text_config()
    assert set(getattr(text, "layer_types", None) or ()) == kinds
    if kinds:
        assert len(text.layer_types) == text.num_hidden_layers


def test_sliding_window_is_shorter_than_test_sequences() -> None:
    config = tiny_config(Gemma2Config)
    assert config.sliding_window < 13
    assert config.layer_types == ["sliding_attention", "full_attention"]


@since("5.6")
def test_tiny_config_has_gqa_and_several_experts() -> None:
    config = tiny_config(MixtralConfig)
    assert config.num_key_value_heads == 4
    assert config.num_local_experts == 4 > config.num_experts_per_tok
    config = tiny_config(GptOssConfig)
    assert config.num_local_experts == config.num_experts == 4  # two names for one value


def test_absent_and_none_keys_are_unchanged() -> None:
    config, default = tiny_config(LlamaConfig), LlamaConfig()
    assert "num_experts" not in config.to_dict()
    assert "sliding_window" not in config.to_dict()
    assert default.hidden_size == 4096
    values: dict[str, Any] = {"sliding_window": None}
    assert tiny_config(MixtralConfig).sliding_window == MixtralConfig(**values).sliding_window  # None: no window


def test_special_tokens_are_always_set() -> None:
    assert LlamaConfig().pad_token_id is None
    config = tiny_config(LlamaConfig)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


def test_nested_configs_are_tiny_and_accept_overrides() -> None:
    overrides = {"text_config": {"intermediate_size": 200, "hidden_size": 128}, "mm_tokens_per_image": 16}
    before = copy.deepcopy(overrides)
    config = tiny_config(Gemma3Config, overrides)
    assert overrides == before
    assert config.vision_config.hidden_size == 256
    assert config.vision_config.num_hidden_layers == 2
    assert (config.text_config.intermediate_size, config.text_config.hidden_size) == (200, 128)
    assert config.mm_tokens_per_image == 16
