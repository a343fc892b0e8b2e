"""Model flags, and their values for the families that set them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Gemma2Config, GemmaConfig, LlamaConfig

from nrl_models import registry
from nrl_models.common.flags import ModelFlag, follow_from
from nrl_models.common.switches import quirks_off
from nrl_models.engines.vllm.vllm_start import needs_its_weights


def test_names_of_set_flags() -> None:
    both = ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK | ModelFlag.VLLM_LOAD_FORMAT_AUTO
    assert ModelFlag.NONE.names == []
    assert ModelFlag.VLLM_LOAD_FORMAT_AUTO.names == ["VLLM_LOAD_FORMAT_AUTO"]
    assert both.names == ["SKIP_DTENSOR_TIED_WEIGHTS_CHECK", "VLLM_LOAD_FORMAT_AUTO"]
    assert ModelFlag(0) is ModelFlag.NONE
    assert not ModelFlag.NONE


def test_flags_have_distinct_values() -> None:
    values = [flag.value for flag in ModelFlag]
    assert len(set(values)) == len(values) == len(ModelFlag.__members__) - 1  # NONE is not a flag


def test_tied_weights_flag_follows_published_configs() -> None:
    for name, ties in (("GemmaForCausalLM", True), ("CohereForCausalLM", True), ("LlamaForCausalLM", False)):
        assert (ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK in registry.model_class(name).flags) is ties
    published = {"small": {}, "large": {"tie_word_embeddings": False}}
    assert follow_from(GemmaConfig, {"small": {}}) is ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK
    assert follow_from(GemmaConfig, published) is ModelFlag.NONE


def test_needs_its_weights(tmp_path: Path) -> None:
    for config, asks in ((Gemma2Config(architectures=["Gemma2ForCausalLM"]), True), (LlamaConfig(), False)):
        config.save_pretrained(tmp_path)
        assert needs_its_weights(tmp_path) is asks
        with quirks_off("engine-dummy-buffers"):
            assert not needs_its_weights(tmp_path)


@pytest.mark.parametrize("name", list(registry.FAMILIES))
def test_flags_agree_within_family(name: str) -> None:
    """Classes of one family with the same configuration class have the same flags."""
    classes = [
        registry.model_class(architecture)
        for architecture in registry.FAMILIES[name]
        if not registry.unmet_requirement(architecture)
    ]
    assert all(isinstance(model_class.flags, ModelFlag) for model_class in classes)
    for config_class in {model_class.config_class for model_class in classes}:
        assert len({model_class.flags for model_class in classes if model_class.config_class is config_class}) == 1
