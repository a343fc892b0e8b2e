"""Freezing components by name: their parameters, strict keys, and the parameters passed to an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from nrl_models import freeze, registry, trainable_parameters
from nrl_models.common.model_components import freezing
from nrl_models.common.model_components.freezing import COMPONENTS, components_of, freeze_unreachable
from nrl_models.errors import UnknownArgumentError
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.testing.case import FamilyCase

WITH_IMAGES = "Gemma3ForConditionalGeneration"
WITH_EXPERTS = "Qwen3MoeForCausalLM"
SOME = (
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    WITH_EXPERTS,
    "DeepseekV3ForCausalLM",
    WITH_IMAGES,
    "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "IdeficsForVisionText2Text",  # its decoder is the complete model, with the tower's embeddings
)


def new_model(architecture: str):
    case = FamilyCase(registry.model_class(architecture))
    return case, case.new_pair()[1].train()


@pytest.mark.long
@pytest.mark.parametrize("architecture", SOME)
def test_components_cover_all_parameters(architecture: str) -> None:
    _, model = new_model(architecture)
    components = components_of(model)
    assert list(components) == [key for key in COMPONENTS if key in components]
    assert {name for parameters in components.values() for name in parameters} == {
        name for name, _ in model.named_parameters()
    }
    text = components["freeze_language_model"].keys()
    assert components["freeze_embeddings"].keys() <= text
    assert components.get("freeze_routers", {}).keys() <= text
    tied = {name for name, component in components["freeze_embeddings"].items() if component.ndim == 2}
    rest = [
        set(parameters) for key, parameters in components.items() if key not in ("freeze_embeddings", "freeze_routers")
    ]
    assert sum(map(len, rest)) - len(set().union(*rest)) <= len(tied)  # a tied head is also an embedding
    if getattr(model.config, "vision_config", None) is not None:
        assert "freeze_vision_tower" in components
        assert not any("vision_tower" in name or ".visual." in name for name in text)


@pytest.mark.parametrize("architecture", [WITH_IMAGES, WITH_EXPERTS])
def test_frozen_parameters_get_no_gradient(architecture: str) -> None:
    case, model = new_model(architecture)
    components = components_of(model)
    key = "freeze_vision_tower" if architecture == WITH_IMAGES else "freeze_routers"
    report = freeze(model, {key: True})
    assert report.frozen[key] == sum(component.numel() for component in components[key].values()) > 0
    assert report.total - report.trainable == report.frozen[key]
    model(**case.inputs(labels=True)).loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not with_gradient & components[key].keys()
    assert with_gradient == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trainable_parameters(model))
    optimizer.step()
    assert len(optimizer.state) == len(with_gradient)
    assert freeze(model, {key: False}).trainable == report.total


def test_nested_component_overrides_parent() -> None:
    _, model = new_model(WITH_EXPERTS)
    freeze(model, {"freeze_language_model": True, "freeze_routers": False})
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == components_of(model)["freeze_routers"].keys() | {"lm_head.weight"}


def test_unnamed_components_are_unchanged() -> None:
    _, model = new_model(WITH_IMAGES)
    freeze(model, {"freeze_projector": True})
    freeze(model, {"freeze_vision_tower": True})
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    components = components_of(model)
    assert frozen == components["freeze_projector"].keys() | components["freeze_vision_tower"].keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"freeze_vison_tower": True}, r"freeze_vison_tower \(did you mean freeze_vision_tower\?\).*freeze_projector"),
        ({"vison": True}, r"vison \(did you mean vision\?\)"),
        ({"freeze_audio_tower": True, "freeze_sound": True}, r"parts of \w+: freeze_sound"),  # absent, and unknown
        ({"vision": True, "freeze_vision_tower": True}, r"freeze_vision_tower \(also passed as freeze_vision_tower\)"),
        ({"vision_tower": True, "freeze_lm_head": 1}, r"vision_tower .*, freeze_lm_head=1 \(neither True nor False\)"),
    ],
)
def test_unknown_keys_raise_and_freeze_nothing(config: dict, message: str) -> None:
    _, model = new_model(WITH_IMAGES)
    with pytest.raises(UnknownArgumentError, match=message):
        freeze(model, {"freeze_projector": True, **config})
    assert all(parameter.requires_grad for parameter in model.parameters())


SEEDS = {"vision": True, "audio": True, "language": False}
"""The freeze block of NeMo RL's recipes: towers are frozen and the language model is trained."""


def test_nemo_freeze_config_works_for_every_family(family_case: FamilyCase, caplog: pytest.LogCaptureFixture) -> None:
    case = family_case
    model = case.model_class.from_config(case.config, device="meta")
    components = components_of(model)
    never_trained = _frozen_names(model)
    for parameter in components["freeze_language_model"].values():
        parameter.requires_grad_(False)
    caplog.clear()
    report = freeze(model, SEEDS)
    absent = [key for key in ("freeze_vision_tower", "freeze_audio_tower") if key not in components]
    assert list(report.absent) == absent
    notes = [record.getMessage() for record in caplog.records if record.name == freezing.__name__]
    towers = components.get("freeze_vision_tower", {}) | components.get("freeze_audio_tower", {})
    still_frozen = sorted(never_trained & components["freeze_language_model"].keys())
    assert len(notes) == bool(absent) + bool(still_frozen)
    assert all(key in notes[0] for key in absent)
    assert all(name in notes[-1] for name in still_frozen[:1])
    # Freezing towers does not unfreeze parameters that transformers freezes, such as sinusoidal positions.
    assert _frozen_names(model) == towers.keys() | never_trained


def _frozen_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_conflicting_freezing_of_tied_weights_raises(llama_config: LlamaConfig) -> None:
    llama_config.tie_word_embeddings = True
    model = LlamaForCausalLM.from_config(llama_config)
    assert list(components_of(model)["freeze_lm_head"]) == ["model.embed_tokens.weight"]
    with pytest.raises(UnknownArgumentError, match=r"embed_tokens\.weight is a part of .*tied weights"):
        freeze(model, {"freeze_embeddings": True, "freeze_lm_head": False})
    with pytest.raises(UnknownArgumentError, match="tied weights"):
        freeze(model, {"freeze_language_model": False, "freeze_lm_head": True})
    freeze(model, {"freeze_embeddings": True, "freeze_lm_head": True})
    assert len(trainable_parameters(model)) == len(list(model.parameters())) - 1


def test_freezing_everything_raises(llama_config: LlamaConfig) -> None:
    model = LlamaForCausalLM.from_config(llama_config)
    with pytest.raises(UnknownArgumentError, match="nothing of LlamaForCausalLM would train"):
        freeze(model, {"freeze_language_model": True, "freeze_lm_head": True})
    assert len(trainable_parameters(model)) == len(list(model.parameters()))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter of LlamaForCausalLM is frozen"):
        trainable_parameters(model)


def test_freeze_unreachable() -> None:
    case, model = new_model(WITH_IMAGES)
    model.lm_head.weight.requires_grad_(False)
    inputs = case.inputs(labels=True, images=False)
    reasons = freeze_unreachable(model, lambda: model(**inputs).loss)
    components = components_of(model)
    tied = "model.language_model.embed_tokens.weight"
    assert reasons.keys() == components["freeze_vision_tower"].keys() | components["freeze_projector"].keys()
    assert set(reasons.values()) == {"belongs to a module that is never called"}
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == reasons.keys() | {
        tied
    }
    assert freeze_unreachable(model, lambda: model(**inputs).loss) == {}


@pytest.mark.parametrize(
    ("architecture", "routers"),
    [
        ("DeepseekV3ForCausalLM", ["model.layers.1.mlp.gate.weight"]),
        ("JambaForCausalLM", ["model.layers.1.feed_forward.router.weight"]),
        ("LongcatFlashForCausalLM", [f"model.layers.{layer}.mlp.router.classifier.weight" for layer in (0, 1)]),
        (
            "Ernie4_5_VLMoeForConditionalGeneration",  # declares the layers that contain its experts
            [
                f"model.language_model.layers.1.mlp.{kind}_moe.gate.{suffix}"
                for kind in ("text", "vision")
                for suffix in ("moe_statics.e_score_correction_bias", "weight")
            ],
        ),
    ],
)
def test_router_parameters(architecture: str, routers: list[str]) -> None:
    _, model = new_model(architecture)
    assert sorted(components_of(model)["freeze_routers"]) == routers


@pytest.mark.parametrize("config", [None, "vision", ["vision"]])
def test_freezing_without_dictionary_raises(llama_config: LlamaConfig, config: Any) -> None:
    with pytest.raises(UnknownArgumentError, match=r"expected a dictionary, for example \{.*vision.*: True\}"):
        freeze(LlamaForCausalLM(llama_config), config)
