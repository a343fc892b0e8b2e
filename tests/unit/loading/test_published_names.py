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


def otherwise(model: FamilyModel) -> dict[str, str]:
    """Map hub names of a model to other names that transformers reads as the same, by omitting one renaming on save."""
    adapter, conversions = model.state_dict_adapter, hub_conversions(model) or []
    saved = {tensor.pieces: name for name, tensor in adapter.hub.items()}
    found: dict[str, str] = {}
    for renaming in (conversion for conversion in conversions if isinstance(conversion, WeightRenaming)):
        others = [conversion for conversion in conversions if conversion is not renaming]
        for name, tensor in convert_layout(model, adapter.transformers, adapter.own, others).items():
            if tensor.pieces in saved and name not in adapter.hub | adapter.transformers:
                found.setdefault(saved[tensor.pieces], name)
    read = renamed_keys({*found, *found.values()}, conversions, Renaming())
    return {name: other for name, other in found.items() if read[name] == read[other]}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_architecture_keeps_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    tried = []
    for name in registry.architectures(aliases=False):
        if registry.unmet_requirement(name) or name.endswith("Classification"):
            continue
        case, folder = FamilyCase(registry.model_class(name)), tmp_path / name
        if others := otherwise(case.model()):
            case.reference().save_pretrained(folder)
            tensors = rename(folder, lambda name, others=others: others.get(name, name))
            assert_same(exported(case.model_class.from_pretrained(folder)), tensors)
            shutil.rmtree(folder)
            tried.append(name)
    assert len(tried) > 5  # transformers 5.5 has this many


def as_published(name: str) -> str:
    """Return the published name in Kimi-K2.5's checkpoint for a name that transformers saves."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
    return name.replace("model.mm_projector.", "mm_projector.")


def rename(folder: Path, new: Callable[[str], str]) -> Tensors:
    """Rename the tensors of a checkpoint, and return them."""

    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[new(name)] = tensors.pop(name)

    return edit_weights(folder, edit)


@pytest.fixture(scope="module")
def saved_by_transformers() -> PreTrainedModel:
    """transformers' model."""
    return FamilyCase(registry.model_class(NAME)).reference()


@pytest.fixture
def folder(saved_by_transformers: PreTrainedModel, tmp_path: Path) -> Path:
    """A checkpoint saved by transformers."""
    saved_by_transformers.save_pretrained(tmp_path)
    return tmp_path


def exported(model: FamilyModel) -> Tensors:
    plan = [name for name, _, _ in model.state_dict_adapter.export_plan()]
    tensors = dict(model.state_dict_adapter.iter_export(model))
    assert list(tensors) == plan
    return tensors


@needs_kimi
@pytest.mark.parametrize("new", [as_published, str], ids=["as published", "as transformers saves it"])
def test_what_is_exported_and_saved_has_the_checkpoints_names(
    folder: Path, tmp_path: Path, new: Callable[[str], str]
) -> None:
    tensors = rename(folder, new)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert_same(exported(model), tensors)
    model.save_pretrained(tmp_path / "again")
    assert_same(stored(tmp_path / "again"), tensors)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "again")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert exported(again).keys() == tensors.keys()


def test_a_tower_that_is_wrapped_as_published(tmp_path: Path) -> None:
    FamilyCase(registry.model_class("LlavaForConditionalGeneration")).reference().save_pretrained(tmp_path)
    wrapped = rename(
        tmp_path, lambda name: re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)
    )
    assert any("vision_tower.vision_model." in name for name in wrapped)
    assert_same(exported(AutoModelForImageTextToText.from_pretrained(tmp_path)), wrapped)


@needs_kimi
def test_transformers_itself_saves_other_names(folder: Path, tmp_path: Path) -> None:
    """If transformers starts to save the published names, nrl_models no longer needs to record them."""
    tensors = rename(folder, as_published)
    upstream: Any = registry.model_class(NAME).reference_class()
    upstream.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again").keys() != tensors.keys()


@needs_kimi
def test_names_in_memory_are_not_published_ones(folder: Path, saved_by_transformers: PreTrainedModel) -> None:
    saved = stored(folder)
    own = {name: tensor.clone() for name, tensor in saved_by_transformers.state_dict().items()}
    edit_weights(folder, lambda tensors: (tensors.clear(), tensors.update(own)), WEIGHTS)
    assert exported(AutoModelForImageTextToText.from_pretrained(folder)).keys() == saved.keys()


@needs_kimi
def test_names_that_a_user_maps_are_not_published_ones(folder: Path) -> None:
    saved = stored(folder)
    rename(folder, lambda name: f"wrapped.{name}")
    model = AutoModelForImageTextToText.from_pretrained(folder, key_mapping={r"^wrapped\.": ""})
    assert exported(model).keys() == saved.keys()


@needs_kimi
def test_names_of_either_kind_are_taken(folder: Path, tmp_path: Path) -> None:
    """The adapter, and an engine that started with either kind of names."""
    saved = stored(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    tensors = rename(folder, as_published)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for other, given in ((plain, tensors), (model, saved)):
        assert_same(other.state_dict_adapter.from_hf(given), dict(other.state_dict()))
        with torch.no_grad():
            other.model.language_model.norm.weight.zero_()
        report = HFEngine(other, "engine").refit(given.items(), digests=True)
        assert report.digests.keys() == given.keys()
        assert not report.unwritten
        assert torch.equal(other.model.language_model.norm.weight, given["language_model.model.norm.weight"])
    lost = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    with pytest.raises(StateDictError, match=r"layers\.1\."):
        model.state_dict_adapter.from_hf(lost)
