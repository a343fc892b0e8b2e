"""Ties that change after loading, in every architecture that ties its embeddings."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers.pytorch_utils import Conv1D

from nrl_models import CheckpointError, StateDictError, export_adapter, registry
from nrl_models.common.modules import install
from nrl_models.common.state_dict.ties import as_keywords, declared_ties, have_same_values, tied_names, tying_keys
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.errors import ShardingError
from nrl_models.family import FamilyModel
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies_to
from nrl_models.testing.suite.conditions import ties_embeddings

Tensors = dict[str, torch.Tensor]


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a configuration and all configurations inside."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from parts_of(part)


def tied_model(case: FamilyCase) -> FamilyModel:
    config = case.config
    for part in parts_of(config):
        part.tie_word_embeddings = True
    torch.manual_seed(0)
    return case.model_class.from_config(config).eval()


def untied(model: FamilyModel) -> tuple[list[str], Tensors]:
    """Give each tied tensor separate memory and values. Returns the names of these tensors, and all tensors."""
    ties = list(declared_ties(model))
    for name in ties:
        install(model, name, model.get_parameter(name).detach() + 1)
    assert tied_names(model) == {}
    return ties, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def set_keys(model: FamilyModel, keys: list[str], value: bool) -> None:
    for key in keys:
        *path, last = key.split(".")
        config: Any = model.config
        for part in path:
            config = getattr(config, part)
        setattr(config, last, value)


def tie_in_file(folder: Path, model: FamilyModel) -> None:
    """Edit `config.json` so that it ties all embeddings."""
    values = json.loads((folder / "config.json").read_text())
    for part in (values, *(values.get(name) for name in getattr(model.config, "sub_configs", ()))):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(values))


@applies_to(ties_embeddings)
def test_weights_untied_by_hand_are_exported_saved_and_loaded(family_case: FamilyCase, tmp_path: Path) -> None:
    model = tied_model(family_case)
    before, keys = model.state_dict_adapter, tying_keys(model, declared_ties(model))
    ties, own = untied(model)
    if not ties:
        return  # the tiny configuration lacks the parts that are tied
    for adapter in (before, model.state_dict_adapter, export_adapter(model)):
        sent = dict(adapter.iter_export(model, layout="transformers"))
        assert_same({name: sent[name] for name in own}, own)
    with pytest.raises(CheckpointError, match="disagree on tied weights") as caught:
        model.save_pretrained(tmp_path / "out")
    assert all(f"model.config.{key}" in str(caught.value) for key in keys)
    assert not (tmp_path / "out").exists()
    set_keys(model, keys, False)  # as the message suggests
    for number, state_dict in enumerate((None, model.state_dict())):
        model.save_pretrained(tmp_path / str(number), state_dict=state_dict)
        assert_same(type(model).from_pretrained(tmp_path / str(number)).state_dict(), own)
    tie_in_file(tmp_path / "0", model)
    with pytest.raises(CheckpointError) as caught:
        type(model).from_pretrained(tmp_path / "0")
    assert f"pass {as_keywords(keys, False)} to keep both" in str(caught.value)
    advised: dict[str, Any] = eval(f"dict({as_keywords(keys, False)})")
    loaded = type(model).from_pretrained(tmp_path / "0", **advised).state_dict()
    assert_same({name: loaded[name] for name in ties}, {name: own[name] for name in ties})


def check_one_untied_weight_of_several(case: FamilyCase, tmp_path: Path) -> None:
    """Check exports and files. The other weights share memory, also if the configuration no longer ties them."""
    model = tied_model(case)
    ties, keys = declared_ties(model), tying_keys(model, declared_ties(model))
    for name in ties if len(ties) > 1 else ():
        twin = copy.deepcopy(model)
        install(twin, name, twin.get_parameter(name).detach() + 1)
        own = {key: tensor.clone() for key, tensor in twin.state_dict().items()}
        for is_tied in (True, False):
            set_keys(twin, keys, is_tied)
            sent = dict(twin.state_dict_adapter.iter_export(twin, layout="transformers"))
            left_out = ties.keys() - {name} if is_tied else set()
            assert_same(sent, {key: tensor for key, tensor in own.items() if key not in left_out})
        folder = tmp_path / name
        twin.save_pretrained(folder, state_dict=twin.state_dict())
        assert_same(type(twin).from_pretrained(folder).state_dict(), own)
        with suppress(CheckpointError):  # the output embeddings share memory with the input embeddings
            twin.save_pretrained(folder)
        assert_same(type(twin).from_pretrained(folder).state_dict(), own)


@applies_to(ties_embeddings)
def test_one_untied_weight_of_several_is_exported_and_saved(family_case: FamilyCase, tmp_path: Path) -> None:
    check_one_untied_weight_of_several(family_case, tmp_path)


@pytest.mark.parametrize("architecture", ["Florence2ForConditionalGeneration", "RobertaForCausalLM"])
def test_untied_head_with_other_ties_is_exported_and_saved(architecture: str, tmp_path: Path) -> None:
    """PEFT's merge of a trained head unties only the head, and sets `tie_word_embeddings=False`."""
    check_one_untied_weight_of_several(FamilyCase(registry.model_class(architecture)), tmp_path)


@applies_to(ties_embeddings)
def test_different_values_do_not_load_into_tied_weights(family_case: FamilyCase) -> None:
    """torch would copy both tensors into the tied one, which keeps the last."""
    model = tied_model(family_case)
    ties, keys = declared_ties(model), tying_keys(model, declared_ties(model))
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, kept in ties.items():
        own[name].view(-1)[0] = own[kept].view(-1)[0] = float("nan")
    model.load_state_dict(own)  # equal copies load
    if not ties:
        return  # the tiny configuration lacks the parts that are tied
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name, kept = next(iter(ties.items()))
    values = {key: tensor + 1 for key, tensor in own.items()} | {name: own[name] + 2}
    for strict in (True, False):
        with pytest.raises(StateDictError, match=f"{name}: differs from {kept}") as caught:
            model.load_state_dict(values, strict=strict)
        assert all(f"{key}=False" in str(caught.value) for key in keys)
    assert all(have_same_values(tensor, before[key]) for key, tensor in model.state_dict().items())
    model.load_state_dict(values, assign=True)
    assert all(have_same_values(model.state_dict()[key], values[key]) for key in (name, kept))


@applies_to(ties_embeddings)
@pytest.mark.parametrize("kind", ["LoRA", "copies"])
def test_adapters_on_embeddings_and_head_are_exported(family_case: FamilyCase, kind: str) -> None:
    """Merged weights of both are sent, or PEFT or the export raises."""
    model = tied_model(family_case)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embeddings is None or head is None or not declared_ties(model):
        return
    names = {id(module): name for name, module in model.named_modules()}
    places = [names[id(embeddings)], names[id(head)]]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    linear = next(
        name
        for name, part in model.named_modules()
        if isinstance(part, (torch.nn.Linear, Conv1D)) and name not in places
    )
    options = {"target_modules": places}
    if kind == "copies":
        options = {"target_modules": [linear], "modules_to_save": [name.rpartition(".")[2] for name in places]}
    try:
        wrapped = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **options))
    except (AttributeError, RuntimeError, TypeError, ValueError):  # PEFT does not support these modules
        return
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    try:
        sent = {
            name: tensor.clone() for name, tensor in export_adapter(wrapped).iter_export(wrapped, layout="transformers")
        }
    except StateDictError:
        return
    for name in places:
        module: Any = wrapped.base_model.model.get_submodule(name)
        expected = module.modules_to_save["default"].weight if kind == "copies" else None
        if expected is None:
            expected = before[f"{name}.weight"] + module.get_delta_weight("default")
        torch.testing.assert_close(sent[f"{name}.weight"], expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    dist.destroy_process_group()


@applies_to(ties_embeddings)
def test_weights_untied_after_sharding_raise(family_case: FamilyCase, mesh: Any, tmp_path: Path) -> None:
    """FSDP ties them again in the next forward."""
    model = tied_model(family_case)
    ties, keys = declared_ties(model), tying_keys(model, declared_ties(model))
    if not ties:
        return
    parallelize(model, mesh)
    for name in ties:
        owner, _, attribute = name.rpartition(".")
        tensor = torch.nn.Parameter(model.get_parameter(name).detach() + 1)
        model.get_submodule(owner).register_parameter(attribute, tensor)
    set_keys(model, keys, False)
    for use in (
        lambda: dict(model.state_dict_adapter.iter_export(model)),
        lambda: save_checkpoint(tmp_path / "resume", model),
        lambda: model.save_pretrained(tmp_path / "saved"),
        model.state_dict,
    ):
        with pytest.raises(ShardingError, match="was replaced after sharding") as caught:
            use()
        named = {problem.subject for problem in caught.value.problems}
        # FSDP keeps one of two tied parameters, and the other one counts as replaced.
        assert len(named) == len(ties)
        assert named <= {*ties, *ties.values()}
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".json")]


@applies_to(ties_embeddings)
def test_resume_checkpoint_keeps_untied_weights(family_case: FamilyCase, mesh: Any, tmp_path: Path) -> None:
    model = tied_model(family_case)
    ties, keys = declared_ties(model), tying_keys(model, declared_ties(model))
    if not ties:
        return
    untied(model)
    set_keys(model, keys, False)
    parallelize(model, mesh)
    own = {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model, layout="transformers")}
    assert ties.keys() <= own.keys()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(tmp_path / "resume", model, optimizer)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(tmp_path / "resume", model, optimizer)
    assert_same(dict(model.state_dict_adapter.iter_export(model, layout="transformers")), own)
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert_same(dict(loaded.state_dict_adapter.iter_export(loaded, layout="transformers")), own)
