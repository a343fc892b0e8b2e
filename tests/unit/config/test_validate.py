"""A configuration that asks for something nobody does is refused; what published configurations say is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.common.config.validate import check_config
from nrl_models.errors import ConfigurationError
from nrl_models.families.gemma3.model import Gemma3ForConditionalGeneration
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.family import FamilyModel
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""Configurations as they stand on the hub, by repository, quantised layers and layer patterns cut short."""


def config_of(name: str, **changes: Any) -> tuple[type, PreTrainedConfig]:
    registry.register_custom_configs()
    values = PUBLISHED[name] | changes
    return registry.model_class(values["architectures"][0]), AutoConfig.for_model(**values)


def problems(model_class: type, config: PreTrainedConfig, ignored: Any = ()) -> dict[str, tuple[str, str]]:
    with pytest.raises(ConfigurationError) as caught:
        check_config(model_class, config, ignored)
    return {problem.subject: (problem.kind, problem.detail) for problem in caught.value.problems}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_pass(name: str) -> None:
    check_config(*config_of(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_key_nobody_reads_is_refused_whatever_else_there_is(name: str) -> None:
    model_class, config = config_of(name, use_fourth_dimension=True)
    found = problems(model_class, config)
    assert list(found) == ["use_fourth_dimension"]
    assert found["use_fourth_dimension"][0] == "unknown"


def test_everything_that_is_wrong_is_named_with_the_nearest_key_and_the_way_out(llama_config: LlamaConfig) -> None:
    config = LlamaConfig(**llama_config.to_dict(), rms_norm_epsilon=1e-5, attn_logit_softcapping=50.0)
    with pytest.raises(ConfigurationError) as caught:
        AutoModelForCausalLM.from_config(config)
    message = str(caught.value)
    assert "LlamaForCausalLM does not do (2 problems)" in message
    assert "rms_norm_epsilon: is 1e-05" in message
    assert "did you mean rms_norm_eps?" in message
    assert "attn_logit_softcapping: is 50.0, and neither LlamaConfig nor the model reads it" in message
    assert "ignore_config_keys=('rms_norm_epsilon', 'attn_logit_softcapping',)" in message


def test_a_checkpoint_is_refused_before_anything_is_read(folder: Path) -> None:
    edit_config(folder, attention_bais=True)
    (folder / "model.safetensors").write_bytes(b"not what it was")
    with pytest.raises(ConfigurationError, match=r"attention_bais: is True.* did you mean attention_bias"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("ignored", ["use_qk_norm", ("use_qk_norm",), {"use_qk_norm", "something_else"}])
def test_the_user_may_ignore_a_key(folder: Path, ignored: Any) -> None:
    edit_config(folder, use_qk_norm=True)
    with pytest.raises(ConfigurationError, match="use_qk_norm"):
        LlamaForCausalLM.from_pretrained(folder)
    assert LlamaForCausalLM.from_pretrained(folder, ignore_config_keys=ignored).config.use_qk_norm is True
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config, ignore_config_keys=ignored).combine


def test_parts_are_checked_and_ignored_by_path() -> None:
    config = FamilyCase(Gemma3ForConditionalGeneration).config
    config.vision_config.use_rope = True
    config.text_config.use_rope = True
    assert set(problems(Gemma3ForConditionalGeneration, config)) == {"text_config.use_rope", "vision_config.use_rope"}
    assert set(problems(Gemma3ForConditionalGeneration, config, "vision_config.use_rope")) == {"text_config.use_rope"}
    check_config(Gemma3ForConditionalGeneration, config, "use_rope")


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_a_key_that_asks_for_nothing_passes_unless_it_is_misspelt(llama_config: LlamaConfig, value: Any) -> None:
    check_config(LlamaForCausalLM, LlamaConfig(**llama_config.to_dict(), logit_softcapping=value))
    misspelt = LlamaConfig(**llama_config.to_dict(), tie_word_embedding=value)
    assert "did you mean tie_word_embeddings" in problems(LlamaForCausalLM, misspelt)["tie_word_embedding"][1]


def test_keys_of_generation_and_bookkeeping_pass(llama_config: LlamaConfig) -> None:
    config = LlamaConfig(
        **llama_config.to_dict(), temperature=0.7, num_beams=4, unsloth_version="2025.1", aux_loss_alpha=0.001,
        _attn_implementation_autoset=True, auto_map={"AutoConfig": "x.Y"}, **{"transformers.js_config": {"a": 1}},
    )  # fmt: skip
    check_config(LlamaForCausalLM, config)


@pytest.mark.parametrize("key", ["scoring_func", "topk_method", "moe_layer_freq"])
def test_a_value_the_family_does_not_do_is_refused(key: str) -> None:
    model_class, config = config_of("deepseek-ai/DeepSeek-V3", **{key: 2})
    kind, detail = problems(model_class, config)[key]
    assert kind == "unsupported"
    assert detail == f"is 2; only {PUBLISHED['deepseek-ai/DeepSeek-V3'][key]!r} is supported"
    check_config(model_class, config, key)


def test_a_value_no_code_honours_is_refused() -> None:
    # gpt-oss computes its own activation, whatever the configuration says.
    model_class, config = config_of("openai/gpt-oss-20b", hidden_act="gelu")
    assert problems(model_class, config) == {
        "hidden_act": ("unsupported", "is 'gelu', which no code honours; only 'silu' is supported")
    }
    check_config(model_class, config, "hidden_act")


def test_a_key_that_only_the_modelling_code_reads_is_known() -> None:
    # `classifier_dropout` is declared nowhere; the token classifier of every model asks for it.
    config = tiny_config(LlamaConfig)
    config.classifier_dropout = 0.3
    check_config(registry.model_class("LlamaForTokenClassification"), config)


def test_of_a_class_that_is_no_familys_nothing_is_checked(llama_config: LlamaConfig) -> None:
    config = LlamaConfig(**llama_config.to_dict(), use_qk_norm=True)
    check_config(FamilyModel.reference_class.__func__(LlamaForCausalLM), config)
