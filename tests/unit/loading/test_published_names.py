"""Checkpoints whose names transformers reads but saves differently keep their published names for engines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, assert_same, edit_weights, stored
from transformers import PreTrainedModel

from nrl_models import AutoModelForImageTextToText, registry
from nrl_models.common.state_dict.layouts import convert_layout, hub_conversions, renamed_keys
from nrl_models.common.upstream_conversions import Renaming, WeightRenaming
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import StateDictError
from nrl_models.family import FamilyModel
from nrl_models.testing.case import FamilyCase

NAME = "Kimi_K25ForConditionalGeneration"

Tensors = dict[str, torch.Tensor]

needs_kimi = pytest.mark.skipif(
    registry.unmet_requirement(NAME) is not None, reason=f"the installed transformers has no {NAME}"
)


def alternative_names(model: FamilyModel) -> dict[str, str]:
    """Map hub names of a model to other names that transformers reads as the same, by omitting one renaming on save."""
    adapter, conversions = model.state_dict_adapter, hub_conversions(model) or []
    saved = {tensor.pieces: name for name, tensor in adapter.hub.items()}
    found: dict[str, str] = {}
    for renaming in (conversion for conversion in conversions if isinstance(conversion, WeightRenaming)):
        others = [conversion for conversion in conversions if conversion is not renaming]
        for name, tensor in convert_layout(model, adapter.transformers, adapter.specs, others).items():
            if tensor.pieces in saved and name not in adapter.hub | adapter.transformers:
                found.setdefault(saved[tensor.pieces], name)
    read = renamed_keys({*found, *found.values()}, conversions, Renaming())
    return {name: other for name, other in found.items() if read[name] == read[other]}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_architecture_exports_checkpoint_names(tmp_path: Path) -> None:
    tested = []
    for name in registry.architectures(aliases=False):
        if registry.unmet_requirement(name) or name.endswith("Classification"):
            continue
        case, folder = FamilyCase(registry.model_class(name)), tmp_path / name
        if others := alternative_names(case.model()):
            case.reference().save_pretrained(folder)
            tensors = rename(folder, lambda name, others=others: others.get(name, name))
            assert_same(exported(case.model_class.from_pretrained(folder)), tensors)
            shutil.rmtree(folder)
            tested.append(name)
    assert len(tested) > 5  # transformers 5.5 has this many


def published_name(name: str) -> str:
    """Return the published name in Kimi-K2.5's checkpoint for a name that transformers saves."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
    return name.replace("model.mm_projector.", "mm_projector.")


def rename(folder: Path, new_name: Callable[[str], str]) -> Tensors:
    """Rename the tensors of a checkpoint, and return them."""

    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[new_name(name)] = tensors.pop(name)

    return edit_weights(folder, edit)


@pytest.fixture(scope="module")
def hf_model() -> PreTrainedModel:
    """transformers' Kimi model with random weights."""
    return FamilyCase(registry.model_class(NAME)).reference()


@pytest.fixture
def folder(hf_model: PreTrainedModel, tmp_path: Path) -> Path:
    """Folder of a checkpoint saved by transformers."""
    hf_model.save_pretrained(tmp_path)
    return tmp_path


def exported(model: FamilyModel) -> Tensors:
    plan = [name for name, _, _ in model.state_dict_adapter.export_plan()]
    tensors = dict(model.state_dict_adapter.iter_export(model))
    assert list(tensors) == plan
    return tensors


@needs_kimi
@pytest.mark.parametrize("new_name", [published_name, str], ids=["as published", "as transformers saves it"])
def test_export_and_save_use_checkpoint_names(folder: Path, tmp_path: Path, new_name: Callable[[str], str]) -> None:
    tensors = rename(folder, new_name)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert_same(exported(model), tensors)
    model.save_pretrained(tmp_path / "again")
    assert_same(stored(tmp_path / "again"), tensors)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "again")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert exported(again).keys() == tensors.keys()


def test_export_keeps_vision_model_prefix(tmp_path: Path) -> None:
    FamilyCase(registry.model_class("LlavaForConditionalGeneration")).reference().save_pretrained(tmp_path)
    wrapped = rename(
        tmp_path, lambda name: re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)
    )
    assert any("vision_tower.vision_model." in name for name in wrapped)
    assert_same(exported(AutoModelForImageTextToText.from_pretrained(tmp_path)), wrapped)


@needs_kimi
def test_transformers_saves_different_names(folder: Path, tmp_path: Path) -> None:
    """If transformers starts to save the published names, nrl_models no longer needs to record them."""
    tensors = rename(folder, published_name)
    upstream: Any = registry.model_class(NAME).reference_class()
    upstream.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again").keys() != tensors.keys()


@needs_kimi
def test_in_memory_names_are_not_recorded(folder: Path, hf_model: PreTrainedModel) -> None:
    saved = stored(folder)
    own = {name: tensor.clone() for name, tensor in hf_model.state_dict().items()}
    edit_weights(folder, lambda tensors: (tensors.clear(), tensors.update(own)), WEIGHTS)
    assert exported(AutoModelForImageTextToText.from_pretrained(folder)).keys() == saved.keys()


@needs_kimi
def test_key_mapping_names_are_not_recorded(folder: Path) -> None:
    saved = stored(folder)
    rename(folder, lambda name: f"wrapped.{name}")
    model = AutoModelForImageTextToText.from_pretrained(folder, key_mapping={r"^wrapped\.": ""})
    assert exported(model).keys() == saved.keys()


@needs_kimi
def test_from_hf_and_refit_accept_both_name_formats(folder: Path, tmp_path: Path) -> None:
    """Covers the state dict adapter, and engines that started with saved or published names."""
    saved = stored(folder)
    saved_names_model = AutoModelForImageTextToText.from_pretrained(folder)
    tensors = rename(folder, published_name)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for other, state_dict in ((saved_names_model, tensors), (model, saved)):
        assert_same(other.state_dict_adapter.from_hf(state_dict), dict(other.state_dict()))
        with torch.no_grad():
            other.model.language_model.norm.weight.zero_()
        report = HFEngine(other, "engine").refit(state_dict.items(), digests=True)
        assert report.digests.keys() == state_dict.keys()
        assert not report.unwritten
        assert torch.equal(other.model.language_model.norm.weight, state_dict["language_model.model.norm.weight"])
    incomplete = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    with pytest.raises(StateDictError, match=r"layers\.1\."):
        model.state_dict_adapter.from_hf(incomplete)
