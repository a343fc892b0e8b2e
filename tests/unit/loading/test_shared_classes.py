"""Model types without a model class: transformers builds another family's class from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import assert_same, edit_config, edit_weights, stored
from transformers import AutoConfig, Gemma3Config, PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import nrl_models
from nrl_models import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, auto, registry
from nrl_models.errors import CheckpointError, UnknownArchitectureError
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.loading.shared_classes import shared_class_note, shared_classes
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

KNOWN = ("exaone", "glmga", "internlm3", "iquestcoder", "pp_chart2table", "sarvam_mla", "sarvam_moe", "shieldgemma2")
SHARED = [model_type for model_type in KNOWN if model_type in CONFIG_MAPPING]
"""Model types of the installed transformers."""

UNREADABLE = ("shieldgemma2",)
"""Model types whose files transformers does not load itself, so there is no reference (5.23, 5.24)."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_shared_model_type_is_known() -> None:
    model_types = []
    for model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # a class without a default configuration, which no checkpoint uses
            continue
        if any(shared.__name__ in registry.MODEL_ARCH_MAPPING for shared in shared_classes(config)):
            model_types.append(model_type)
    assert sorted(model_types) == SHARED


def upstream_auto(config: PreTrainedConfig) -> Any:
    return auto.auto_class_of(config).upstream


def saved(model_type: str, folder: Path) -> PreTrainedModel:
    """Save a tiny transformers model with the names of its model type."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = upstream_auto(config_class())._model_mapping[config_class]
    torch.manual_seed(0)
    reference = model_class._from_config(tiny_config(config_class, None, model_class)).eval()
    randomize(reference)
    reference.save_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).model_type == model_type
    return reference


@pytest.mark.long
@pytest.mark.parametrize("published", [False, True], ids=["class", "published"])
@pytest.mark.parametrize("model_type", [name for name in SHARED if name not in UNREADABLE])
def test_model_type_keeps_checkpoint_names(model_type: str, published: bool, tmp_path: Path) -> None:
    reference = saved(model_type, tmp_path / "stored")
    if published:  # with the class name from the checkpoint's remote code
        edit_config(tmp_path / "stored", architectures=[f"Remote{type(reference).__name__}"])
    auto_class: Any = auto.auto_class_for(tmp_path / "stored")
    model = auto_class.from_pretrained(tmp_path / "stored")
    assert isinstance(model, nrl_models.family.FamilyModel)
    assert type(model).__name__ == type(reference).__name__
    inputs = inputs_for(reference)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, reference(**inputs).logits)
    files = stored(tmp_path / "stored")
    assert_same(dict(model.state_dict_adapter.iter_export(model)), files)
    assert_same(model.state_dict_adapter.from_hf(files), model.state_dict())
    model.save_pretrained(tmp_path / "again")
    assert_same(stored(tmp_path / "again"), files)
    assert AutoConfig.from_pretrained(tmp_path / "again").model_type == model_type


@pytest.mark.skipif("exaone" not in SHARED, reason="the installed transformers has no exaone")
def test_key_mapping_per_model_type(tmp_path: Path) -> None:
    saved("exaone", tmp_path / "exaone")
    saved("internlm3", tmp_path / "internlm3")
    exaone = AutoModelForCausalLM.from_pretrained(tmp_path / "exaone")
    internlm = AutoModelForCausalLM.from_pretrained(tmp_path / "internlm3")
    assert type(exaone) is type(internlm)
    assert "transformer.wte.weight" in exaone.state_dict_adapter.hub
    assert "model.embed_tokens.weight" in internlm.state_dict_adapter.hub
    decoder = AutoModel.from_pretrained(tmp_path / "exaone")
    assert_same(decoder.state_dict(), exaone.model.state_dict())


@pytest.mark.skipif("exaone" not in SHARED, reason="the installed transformers has no exaone")
def test_family_class_loads_head_without_auto_class(tmp_path: Path) -> None:
    saved("exaone", tmp_path)
    with pytest.raises(UnknownArchitectureError, match=r"serves it through LlamaForCausalLM \(family llama\)"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    llama: Any = registry.model_class("LlamaForSequenceClassification")
    model = llama.from_pretrained(tmp_path, strict=False)
    assert_same(model.model.state_dict(), AutoModel.from_pretrained(tmp_path).state_dict())


@pytest.mark.skipif("exaone" not in SHARED, reason="the installed transformers has no exaone")
@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("exaone", "with the key mapping of model_type 'exaone'"),
        ("internlm3", "has no key mapping for model_type 'internlm3'"),
    ],
)
def test_error_names_family_and_key_mapping(model_type: str, expected: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({"decoder.other.weight": tensors.pop("lm_head.weight")}))
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    version = transformers.__version__
    assert f"transformers {version} serves it through LlamaForCausalLM (family llama)" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("config", [Gemma3Config(), Qwen2Config()], ids=["composite", "own class"])
def test_model_type_with_model_class_is_not_shared(config: PreTrainedConfig) -> None:
    assert list(shared_classes(config)) == []
    assert shared_class_note(config) == ""


@pytest.mark.skipif("shieldgemma2" not in SHARED, reason="the installed transformers has no shieldgemma2")
def test_shieldgemma2_classifier_loads_as_its_language_model(tmp_path: Path) -> None:
    reference: Any = transformers.ShieldGemma2ForImageClassification._from_config(
        tiny_config(transformers.ShieldGemma2Config, None, transformers.Gemma3ForConditionalGeneration)
    ).eval()
    randomize(reference)
    reference.save_pretrained(tmp_path)
    model = nrl_models.AutoModelForImageTextToText.from_pretrained(tmp_path)
    inputs = inputs_for(reference.model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, reference.model(**inputs).logits)
