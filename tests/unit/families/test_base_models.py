"""Base models: a family's layers without a head, loaded from a head's checkpoint and from their own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, edit_config, edit_weights, hf_tensors, stored
from transformers import AutoConfig, Qwen2AudioConfig, RwkvConfig
from transformers import AutoModel as HFAutoModel

from nrl_models import AutoModel, AutoModelForCausalLM, CheckpointError, registry
from nrl_models.auto import auto_class_of
from nrl_models.common.modules import is_base_model
from nrl_models.common.projections import report
from nrl_models.common.upstream_conversions import as_meant
from nrl_models.family import FamilyModel
from nrl_models.testing.case import FamilyCase

HEADS = (
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "MixtralForCausalLM",  # one tensor per expert
    "BertLMHeadModel",  # a pooler that the head does not have
    "XLMRobertaForCausalLM",
    "NemotronHForCausalLM",  # another prefix on the hub
    "Gemma3nForCausalLM",  # layers that share keys and values
    "Qwen2_5_VLForConditionalGeneration",  # a base model that is rewritten
    "Glm4vForConditionalGeneration",
    "LlavaForConditionalGeneration",  # a head inside the text model on the hub
)

PUBLISHED_NAMES = (
    "AriaForConditionalGeneration",
    "Gemma3ForConditionalGeneration",  # a base model that accepts labels
    "Kosmos2ForConditionalGeneration",  # a base model without a prefix
    "Qwen2AudioForConditionalGeneration",
)
"""Models whose published names have no prefix of the base model."""

OWN_HEADS = ("Blip2ForConditionalGeneration", "Llama4ForConditionalGeneration", "KimiVLForConditionalGeneration")
"""Models that transformers' `AutoModel` loads with their head, or does not load."""

COMPOSITE = [
    name
    for name in registry.architectures(aliases=False)
    if name.endswith("ForConditionalGeneration") and name not in OWN_HEADS and not registry.unmet_requirement(name)
]


@pytest.mark.parametrize("architecture", HEADS)
@torch.no_grad()
def test_base_model_matches_transformers(architecture: str, tmp_path: Path) -> None:
    case = FamilyCase(registry.model_class(architecture))
    case.reference().save_pretrained(tmp_path / "head")
    expected, expected_info = HFAutoModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    strict = not expected_info["missing_keys"]
    if not strict:
        with pytest.raises(CheckpointError, match="missing: "):
            AutoModel.from_pretrained(tmp_path / "head")
    model, info = AutoModel.from_pretrained(tmp_path / "head", output_loading_info=True, strict=strict, combine=True)
    assert isinstance(model, FamilyModel)
    assert type(model).reference_class() is type(expected)
    assert registry.model_class(type(model).__name__) is type(model)
    assert info["missing_keys"] == expected_info["missing_keys"]
    assert (info["unexpected_keys"] == set()) == (expected_info["unexpected_keys"] == set())
    if not strict:
        model.load_state_dict(expected.state_dict())
    assert_same(model.state_dict(), expected.state_dict())
    assert [group.linears for group in report(model)] == [
        group.linears for group in report(case.model()) if "score" not in group.name
    ]
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    inputs = case.inputs()
    torch.testing.assert_close(model(**inputs)[0], expected(**inputs)[0], atol=1e-5, rtol=1e-5)
    # The saved checkpoint equals transformers', and is a checkpoint of the base model.
    model.save_pretrained(tmp_path / "ours")
    expected.save_pretrained(tmp_path / "theirs")
    assert_same(stored(tmp_path / "ours"), as_meant(stored(tmp_path / "theirs")))
    for path in (tmp_path / "theirs").glob("*config.json"):
        assert (tmp_path / "ours" / path.name).read_text() == path.read_text()
    for folder in ("ours", "theirs"):
        assert auto_class_of(AutoConfig.from_pretrained(tmp_path / folder)) is AutoModel
        assert_same(AutoModel.from_pretrained(tmp_path / folder).state_dict(), model.state_dict())
    adapter = model.state_dict_adapter
    assert_same(adapter.from_hf(adapter.to_hf(model.state_dict())), model.state_dict())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in PUBLISHED_NAMES else pytest.mark.long) for name in COMPOSITE],
)
def test_value_head_is_not_loaded_into_base_model(architecture: str, named: bool, tmp_path: Path) -> None:
    reference = FamilyCase(registry.model_class(architecture)).reference()
    if type(reference.config) not in HFAutoModel._model_mapping:
        pytest.skip("this transformers has no base model for it")
    reference.save_pretrained(tmp_path)
    file = sorted(tmp_path.glob("*.safetensors"))[0].name
    hidden_size = reference.config.get_text_config(decoder=True).hidden_size
    head = {"v_head.summary.weight": torch.ones(1, hidden_size), "v_head.summary.bias": torch.ones(1)}
    edit_weights(tmp_path, lambda tensors: tensors.update(head), file)
    if not named:
        edit_config(tmp_path, architectures=None)
    expected, told = HFAutoModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert told["unexpected_keys"]
    if told["missing_keys"]:
        with pytest.raises(CheckpointError, match="missing: "):
            AutoModel.from_pretrained(tmp_path)
        return
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(hf_tensors(model), expected.state_dict())


@pytest.mark.parametrize(
    "name", ["v_head.summary.weight", "multi_modal_adapter.linear.weight", "language_model.extra.weight", "extra"]
)
def test_other_unknown_modules_next_to_published_names_raise(name: str, tmp_path: Path) -> None:
    """Only a module with one output is a head: others may be parts of the base model."""
    FamilyCase(registry.model_class("AriaForConditionalGeneration")).reference().save_pretrained(tmp_path)
    file = sorted(tmp_path.glob("*.safetensors"))[0].name
    rows = 1 if name.startswith(("language_model", "extra")) else 2
    if rows == 2 and any(key.startswith("model.") for key in stored(tmp_path)):
        pytest.skip("this transformers saves names with the prefix of the base model: other modules are heads")
    edit_weights(tmp_path, lambda tensors: tensors.update({name: torch.ones(rows, 256)}), file)
    with pytest.raises(CheckpointError, match=rf"unexpected: {name}"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.skipif(Qwen2AudioConfig not in HFAutoModel._model_mapping, reason="transformers has no such base model")
def test_base_model_of_qwen2_audio_loads_without_head(tmp_path: Path) -> None:
    """The base model accepts labels, but has no head and no loss."""
    FamilyCase(registry.model_class("Qwen2AudioForConditionalGeneration")).reference().save_pretrained(tmp_path)
    expected, told = HFAutoModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    if told["missing_keys"]:  # transformers 5.18 does not read the names that it saves
        with pytest.raises(CheckpointError, match="missing: "):
            AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
        return
    model, info = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert is_base_model(model)
    assert info["unexpected_keys"] == {"language_model.lm_head.weight"}
    assert_same(hf_tensors(model), expected.state_dict())


def test_unexpected_tensors_besides_head_raise(folder: Path) -> None:
    assert type(AutoModel.from_pretrained(folder)).__name__ == "LlamaModel"
    edit_weights(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    edit_weights(folder, lambda tensors: tensors.update({"extra": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"2 problems\)\n.*unexpected: extra.*\n.*unexpected: model\.extra"):
        AutoModel.from_pretrained(folder)


def test_base_checkpoint_without_head_raises(tmp_path: Path, folder: Path) -> None:
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def test_base_models_are_registered_but_not_listed() -> None:
    model_class = registry.model_class("LlamaModel")
    assert registry.MODEL_ARCH_MAPPING["LlamaModel"] == ("nrl_models.families.base_models", "LlamaModel")
    assert model_class.rewrites == registry.model_class("LlamaForCausalLM").rewrites
    assert "LlamaModel" not in registry.architectures()
    for other in ("LlamaPreTrainedModel", "RwkvModel", "NoModel"):
        assert registry.model_class(other) is None


@pytest.mark.usefixtures("sandbox")
def test_unregistered_base_model_falls_back_to_transformers() -> None:
    config = RwkvConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=128)
    with pytest.warns(UserWarning, match="RwkvModel is not registered"):
        assert type(AutoModel.from_config(config, device="meta")).__name__ == "RwkvModel"
