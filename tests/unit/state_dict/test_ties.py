"""Ties are read from memory and configuration on each use: by export, files and advice."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import assert_same, edit_weights, stored
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

from nrl_models import CheckpointError, StateDictError, export_adapter, registry
from nrl_models.common.modules import install
from nrl_models.common.state_dict.ties import (
    as_keywords,
    declared_ties,
    have_same_values,
    tied_names,
    tying_keys,
)
from nrl_models.family import FamilyModel
from nrl_models.testing.case import FamilyCase

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

ARCHITECTURES = {
    "LlamaForCausalLM": ["tie_word_embeddings"],
    "KimiVLForConditionalGeneration": ["text_config.tie_word_embeddings"],
    "Florence2ForConditionalGeneration": ["tie_word_embeddings", "text_config.tie_word_embeddings"],
}
"""Architectures with the keys that tie their embeddings: of the complete model, of a part, or of both."""


def tied_model(architecture: str) -> FamilyModel:
    case = FamilyCase(registry.model_class(architecture))
    config = case.config
    inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    for part in (config, *(part for part in inner if part is not None)):
        part.tie_word_embeddings = True
    torch.manual_seed(0)
    return case.model_class.from_config(config)


def untie(model: FamilyModel) -> None:
    """Give each tied tensor separate memory and values."""
    for name in declared_ties(model):
        install(model, name, model.get_parameter(name).detach() + 1)


def set_key(model: FamilyModel, key: str, value: bool) -> None:
    *path, last = key.split(".")
    config: Any = model.config
    for part in path:
        config = getattr(config, part)
    setattr(config, last, value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_untied_model_exports_and_saves_both_tensors(architecture: str, tmp_path: Path) -> None:
    model = tied_model(architecture)
    before, ties = model.state_dict_adapter, declared_ties(model)
    assert ties
    assert tied_names(model) == ties
    assert not {name for name, *_ in before.export_plan(layout="transformers")} & ties.keys()
    untie(model)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for adapter in (before, model.state_dict_adapter):
        exported = dict(adapter.iter_export(model, layout="transformers"))
        assert_same({name: exported[name] for name in own}, own)
    assert [name for name, *_ in model.state_dict_adapter.export_plan(layout="transformers")] == list(exported)
    assert tied_names(model) == {}

    keys = ARCHITECTURES[architecture]
    assert sorted(tying_keys(model, ties)) == sorted(keys)
    for options in ({}, {"state_dict": model.state_dict()}):
        with pytest.raises(CheckpointError, match="disagree on tied weights") as caught:
            model.save_pretrained(tmp_path / "out", **options)
        assert all(f"model.config.{key}" in str(caught.value) for key in keys)
        assert not (tmp_path / "out").exists()
    for key in keys:  # as the message suggests
        set_key(model, key, False)
    for options in ({}, {"state_dict": model.state_dict()}):
        model.save_pretrained(tmp_path / "out", **options)
        assert_same(type(model).from_pretrained(tmp_path / "out").state_dict(), own)


TIED_IN_PARTS = (
    *ARCHITECTURES,
    "BlipForConditionalGeneration",
    "Blip2ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "Kosmos2ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
)
"""Architectures whose ties follow different keys: of the complete model, of a part, or of a model inside it."""


@pytest.mark.long
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in TIED_IN_PARTS else pytest.mark.long)
        for name in registry.architectures(aliases=False)
        if not name.endswith("Classification")
    ],
)
def test_suggested_keywords_load_checkpoint(architecture: str, tmp_path: Path) -> None:
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"needs {unmet}")
    model = tied_model(architecture)
    ties, keys = declared_ties(model), tying_keys(model, declared_ties(model))
    if not ties:
        assert architecture not in TIED_IN_PARTS
        return
    untie(model)
    for key in keys:
        set_key(model, key, False)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = (config.get(name) for name in getattr(model.config, "sub_configs", ()))
    for part in (config, *(part for part in inner if part is not None)):
        part["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError) as caught:
        type(model).from_pretrained(tmp_path)
    assert f"pass {as_keywords(keys, False)} to keep both" in str(caught.value)
    advised: dict[str, Any] = eval(f"dict({as_keywords(keys, False)})")
    loaded = type(model).from_pretrained(tmp_path, **advised)
    assert tied_names(loaded) == {}
    assert_same({name: loaded.state_dict()[name] for name in ties}, {name: model.state_dict()[name] for name in ties})


RETIED: dict[str, Callable[[Any], object]] = {
    "tie_weights": lambda model: model.tie_weights(),
    "resizing": lambda model: model.resize_token_embeddings(model.config.vocab_size + 8),
    "deepcopy": copy.deepcopy,
    "double": lambda model: model.double(),
    "assigned export": lambda model: model.load_state_dict(
        dict(model.state_dict_adapter.iter_export(model)), strict=False, assign=True
    ),
    "alias": lambda model: install(model, HEAD, model.model.embed_tokens.weight.detach()),
}


@pytest.mark.parametrize("edit", RETIED.values(), ids=RETIED)
def test_model_stays_tied(edit: Callable[[Any], Any]) -> None:
    model = tied_model("LlamaForCausalLM")
    changed = edit(model)
    model = changed if isinstance(changed, FamilyModel) else model
    assert tied_names(model) == {HEAD: EMBEDDINGS}
    assert HEAD not in dict(model.state_dict_adapter.iter_export(model))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MixtralForCausalLM", "Florence2ForConditionalGeneration"]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_assigned_export_replaces_all_tied_tensors(architecture: str, device: str) -> None:
    model = tied_model(architecture)
    ties = declared_ties(model)
    exported = {name: tensor * 2 for name, tensor in model.state_dict_adapter.iter_export(model)}
    expected = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    target = type(model).from_config(model.config, device=device)
    target.load_state_dict(exported, strict=False, assign=True)
    assert_same({name: target.state_dict()[name] for name in ties}, {name: expected[name] for name in ties})
    assert tied_names(target) == ties


LOADED: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "as in files": lambda model: dict(model.state_dict_adapter.iter_export(model)),
    "other names only": lambda model: {
        name: tensor for name, tensor in model.state_dict().items() if name not in declared_ties(model).values()
    },
    "all names": lambda model: model.state_dict(),
    "parameters": lambda model: {**model.state_dict(), **dict(model.named_parameters())},
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MixtralForCausalLM", "Florence2ForConditionalGeneration"]
)
def test_loaded_state_dict_keeps_one_tied_parameter(architecture: str, assign: bool, name: str) -> None:
    """A tied tensor may be under any of its names. torch would assign two parameters over the same memory.

    As in torch, names without a tensor are missing unless the model itself loads strictly.
    """
    source = tied_model(architecture)
    model = type(source).from_config(source.config)
    outer = nn.ModuleDict({"policy": type(source).from_config(source.config)})  # its state dict has a prefix
    names = [key for key, _ in model.named_parameters()]
    state_dict = LOADED[name](copy.deepcopy(source))
    absent = {*declared_ties(model), *declared_ties(model).values()} - state_dict.keys()
    result = outer.load_state_dict({f"policy.{key}": tensor for key, tensor in state_dict.items()}, False, assign)
    assert set(result.missing_keys) == {f"policy.{key}" for key in absent}
    assert not result.unexpected_keys
    assert_same(outer["policy"].state_dict(), source.state_dict())
    assert set(model.load_state_dict(state_dict, strict=False).missing_keys) == absent
    assert str(model.load_state_dict(state_dict, assign=assign)) == "<All keys matched successfully>"
    assert_same(model.state_dict(), source.state_dict())
    assert [key for key, _ in model.named_parameters()] == names
    for loaded in (model, cast(FamilyModel, outer["policy"])):
        for tied, kept in declared_ties(loaded).items():
            assert loaded.get_parameter(tied) is loaded.get_parameter(kept)
            assert loaded.get_parameter(tied).requires_grad


def test_retied_model_exports_one_tensor() -> None:
    model = tied_model("LlamaForCausalLM")
    untie(model)
    assert HEAD in dict(model.state_dict_adapter.iter_export(model))
    model.tie_weights()
    assert HEAD not in dict(model.state_dict_adapter.iter_export(model))


UNTIED: dict[str, Callable[[Any], object]] = {
    "equal copy": lambda model: install(model, HEAD, model.lm_head.weight.detach().clone()),
    "cast": lambda model: install(model, HEAD, model.lm_head.weight.detach().double()),
    "assigned separately": lambda model: model.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
    ),
    "new head": lambda model: model.set_output_embeddings(nn.Linear(*model.lm_head.weight.shape[::-1], bias=False)),
}


@pytest.mark.parametrize("edit", UNTIED.values(), ids=UNTIED)
def test_untied_model_exports_both_tensors(edit: Callable[[Any], object]) -> None:
    model = tied_model("LlamaForCausalLM")
    edit(model)
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert torch.equal(exported[HEAD], model.lm_head.weight)
    assert torch.equal(exported[EMBEDDINGS], model.model.embed_tokens.weight)


def test_saving_state_dict_with_only_head_name(tmp_path: Path) -> None:
    model = tied_model("LlamaForCausalLM")
    state_dict = model.state_dict()
    embeddings = state_dict.pop(EMBEDDINGS)
    model.save_pretrained(tmp_path, state_dict=state_dict)
    assert torch.equal(stored(tmp_path)[EMBEDDINGS], embeddings)


def test_tied_weights_with_nan_load(tmp_path: Path) -> None:
    model = tied_model("LlamaForCausalLM")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()}))
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert have_same_values(loaded.lm_head.weight, model.lm_head.weight)
    edit_weights(tmp_path, lambda tensors: tensors[HEAD][3].zero_())
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differs from model\.embed_tokens\.weight"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([1.0, float("inf")], [1.0, float("inf")], True),
        ([1.0, float("inf")], [1.0, -float("inf")], False),
        ([1, 2], [1, 2], True),
        ([1.0, 2.0], [1.0], False),
    ],
)
def test_have_same_values(first: list[float], second: list[float], expected: bool) -> None:
    assert have_same_values(torch.tensor(first), torch.tensor(second)) is expected


@pytest.mark.parametrize(
    ("architecture", "key", "other"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "tie_word_embeddings", "text_config.tie_word_embeddings"),
        ("Pix2StructForConditionalGeneration", "text_config.tie_word_embeddings", "tie_word_embeddings"),
    ],
)
def test_conflicting_tie_keys_round_trip(architecture: str, key: str, other: str, tmp_path: Path) -> None:
    """The configuration classes derive one key from the other when they are read."""
    model = tied_model(architecture)
    untie(model)
    set_key(model, key, False)
    before = model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert {**model.config.to_dict(), "dtype": None, "architectures": None} == {
        **before, "dtype": None, "architectures": None
    }  # fmt: skip
    loaded = type(model).from_pretrained(tmp_path)
    assert declared_ties(loaded) == {}
    assert_same(loaded.state_dict(), model.state_dict())
    set_key(loaded, other, True)
    assert declared_ties(loaded) == {}


COMPUTED: dict[str, Callable[[nn.Module], object]] = {
    "parametrization": lambda linear: parametrize.register_parametrization(linear, "weight", nn.Identity()),
    "weight norm": lambda linear: parametrizations.weight_norm(linear),
    "weight norm by a hook": lambda linear: weight_norm(linear),
    "pruning": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "pruning twice": lambda linear: [prune.l1_unstructured(linear, "weight", 0.1) for _ in range(2)],
}
"""Edits after which a linear has other tensors than a weight."""


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("edit", COMPUTED.values(), ids=COMPUTED)
def test_export_of_parametrized_weight_raises(edit: Callable[[nn.Module], object]) -> None:
    model = tied_model("LlamaForCausalLM")
    before = model.state_dict_adapter
    edit(model.model.layers[0].self_attn.q_proj)
    for adapter in (model.state_dict_adapter, export_adapter(model)):
        for call in (adapter.export_plan, lambda adapter=adapter: next(adapter.iter_export(model))):
            with pytest.raises(StateDictError, match=r"layers\.0\.self_attn\.q_proj\.weight: is computed from other"):
                call()
    with pytest.raises(StateDictError, match="is no longer in the model"):
        next(before.iter_export(model))


def test_removed_parametrization_is_exported() -> None:
    model = tied_model("LlamaForCausalLM")
    linear = model.model.layers[0].self_attn.q_proj
    prune.l1_unstructured(linear, "weight", 0.5)
    prune.remove(linear, "weight")
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert torch.equal(exported["model.layers.0.self_attn.q_proj.weight"], linear.weight)
    assert (linear.weight == 0).sum() == linear.weight.numel() // 2


def test_parametrized_head_is_not_tied() -> None:
    model = tied_model("LlamaForCausalLM")
    parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())
    assert tied_names(model) == {}
