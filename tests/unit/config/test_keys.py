"""Finding the configuration keys that code reads."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from nrl_models.common.config import keys
from nrl_models.common.config.keys import declared_keys, is_read, keys_in_class, keys_in_model, value_at
from nrl_models.common.config.walk import walk
from nrl_models.families.deepseek_v3.model import DeepseekV3ForCausalLM
from nrl_models.families.gemma3.model import Gemma3ForConditionalGeneration
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.testing.case import FamilyCase
from tools.ledger.perturbations import with_value_at


class Legacy(PreTrainedConfig):
    model_type = "legacy"
    width: int = 8

    def __post_init__(self, **kwargs: Any) -> None:
        self.width = kwargs.pop("former_width", self.width)
        super().__post_init__(**kwargs)


class Plain(PreTrainedConfig):
    model_type = "plain"
    width: int = 8


def test_keys_in_class_include_undeclared_keys() -> None:
    assert "former_width" in keys_in_class(Legacy)
    assert Legacy(former_width=4).width == 4
    assert "width" not in keys_in_class(Plain)


def test_keys_in_model_include_nested_models() -> None:
    llama = keys_in_model(LlamaForCausalLM, LlamaConfig())
    assert {"rms_norm_eps", "hidden_act", "mlp_bias", "initializer_range", "tie_word_embeddings"} <= llama
    assert "vision_use_head" not in llama
    config = FamilyCase(Gemma3ForConditionalGeneration).config
    assert {"mm_tokens_per_image", "vision_use_head"} <= keys_in_model(Gemma3ForConditionalGeneration, config)


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Gemma3ForConditionalGeneration, DeepseekV3ForCausalLM])
def test_is_read_agrees_with_keys_in_model(model_class: Any) -> None:
    config = FamilyCase(model_class).config
    known = keys_in_model(model_class, config)
    others = {"vision_use_head", "head_dim", "class", "config", "norm_topk_prob", "mm_tokens_per_image", "rope_theta"}
    keys = known | others | declared_keys(type(config))
    assert {key for key in keys if is_read(key, model_class, config)} == known


def test_ambiguous_definitions_are_read_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    source = '''
TEXT = """
def in_a_docstring(config):
    width
"""

@decorated(
    with_a=config.width,
)
def function(config):
    return config.height
'''
    monkeypatch.setattr(keys, "_source", {"module": source}.get)
    assert "width" in keys._keys_beside("width", "module")
    assert keys._keys_beside("height", "module") == {"height"}
    assert not keys._keys_beside("depth", "module")


def test_nested_config_paths() -> None:
    config = FamilyCase(Gemma3ForConditionalGeneration).config
    paths = {path: value for path, _, _, value in walk(config)}
    assert paths["text_config.num_hidden_layers"] == value_at(config, "text_config.num_hidden_layers") == 2
    changed = with_value_at(config.to_dict(), "text_config.num_hidden_layers", 3)
    assert changed["text_config"]["num_hidden_layers"] == 3
    assert config.text_config.num_hidden_layers == 2
