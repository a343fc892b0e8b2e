"""Export and save complete tensors from sharded models."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from transformers import LlamaConfig, PreTrainedModel

from jobs.memory import Peak
from jobs.setting import assert_same, case_of, full, local, mesh_of
from nrl_models import AutoModelForCausalLM, AutoModelForImageTextToText, registry
from nrl_models.common.state_dict.kept_tensors import KeptTensor, keep
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.distributed import load_checkpoint, parallelize, plan_for, save_checkpoint, saving, shards, share_of
from nrl_models.distributed.parallel_plan import declared_tensor_plan
from nrl_models.errors import ShardingError
from nrl_models.testing.tiny import tiny_config


def exports_and_saves(architecture: str, folder: str, **sizes: int) -> None:
    """Check that a sharded model exports, shows and saves the same as one process, and loads it back."""
    case = case_of(architecture)
    unsharded = copy.deepcopy(case.model())
    adapter = unsharded.state_dict_adapter
    reference = dict(adapter.iter_export(unsharded))
    model = parallelize(copy.deepcopy(unsharded), mesh_of(**sizes))
    for layout in ("hub", "transformers"):
        reference = dict(adapter.iter_export(unsharded, layout=layout))
        exported = list(model.state_dict_adapter.iter_export(model, max_bytes=300_000, layout=layout))
        assert [name for name, _ in exported] == list(reference)
        assert_same(dict(exported), reference)
        views = model.state_dict_adapter.hf_views(model, layout=layout)
        assert_same({name: full(view) for name, view in views.items()}, {name: reference[name] for name in views})
        gathered = {name: full(tensor) for name, tensor in model.state_dict().items()}
        assert_same(
            model.state_dict_adapter.to_hf(gathered, layout=layout),
            adapter.to_hf(unsharded.state_dict(), layout=layout),
        )
    assert list(gathered) == list(unsharded.state_dict())
    separate = list(model.state_dict_adapter.iter_export(model, max_bytes=0))
    assert len({tensor.untyped_storage().data_ptr() for _, tensor in separate}) == len(separate)
    del separate
    for name, parameter in model.named_parameters():
        assert torch.equal(share_of(parameter, gathered[name]), local(parameter)), name
    model.save_pretrained(folder, max_shard_size="700KB")
    if dist.get_rank() == 0:
        unsharded.save_pretrained(folder + "-whole", max_shard_size="700KB")
    dist.barrier()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    loaded = model.load_state_dict(unsharded.state_dict())  # complete tensors; every rank takes its shards
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
    assert_same(dict(model.state_dict_adapter.iter_export(model)), dict(adapter.iter_export(unsharded)))


def assigned_tensors_stay_tied(**sizes: int) -> None:
    """Check that a loaded sharded model has one tied parameter, from complete tensors and from shards."""
    case = case_of("LlamaForCausalLM", {"tie_word_embeddings": True})
    unsharded = copy.deepcopy(case.model())
    sharded = parallelize(copy.deepcopy(unsharded), mesh_of(**sizes))
    exported = dict(unsharded.state_dict_adapter.iter_export(unsharded))
    for state_dict in (exported, unsharded.state_dict(), sharded.state_dict()):
        for assign in (False, True):
            model = parallelize(copy.deepcopy(unsharded), mesh_of(**sizes))
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.zero_()
            model.load_state_dict(state_dict, assign=assign)
            assert model.lm_head.weight is model.model.embed_tokens.weight
            assert_same(dict(model.state_dict_adapter.iter_export(model)), exported)


def full_state_dict_by_torch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gather the model's tensors with torch only."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def placements_are_correct(architecture: str, **sizes: int) -> None:
    """Check that torch gathers and shards every tensor as its placements declare."""
    case = case_of(architecture)
    unsharded = case.model().state_dict()
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    assert_same({name: full(tensor) for name, tensor in model.state_dict().items()}, unsharded)
    assert_same(full_state_dict_by_torch(model), unsharded)
    for broadcast in (False, True):
        others = {name: tensor + 1 + broadcast for name, tensor in unsharded.items()}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, dict(others), options=options)
        assert_same({name: full(tensor) for name, tensor in model.state_dict().items()}, others)


def packed_placements_are_correct(step: int, **sizes: int) -> tuple[int, dict[str, str]]:
    """Check every `step`-th architecture. Returns how many have packed placements, and the wrong ones."""
    mesh = mesh_of(**sizes)
    count, wrong = 0, {}
    for architecture in registry.architectures(aliases=False)[::step]:
        if registry.unmet_requirement(architecture):
            continue
        case = case_of(architecture)
        with torch.device("meta"):
            model = case.model_class(case.config)
        if not any("packed" in style for style in declared_tensor_plan(model).values()):
            continue
        try:
            plan_for(model, mesh)
        except ShardingError:
            continue
        count += 1
        try:
            placements_are_correct(architecture, **sizes)
        except Exception as error:  # the same on each rank, because complete tensors are compared
            wrong[architecture] = str(error)
    return count, wrong


def reshards_by_torch(architecture: str, folder: str, before: dict[str, int], after: dict[str, int]) -> None:
    """Save model and optimizer with DCP, load them on another mesh, and save the full state dict."""
    case = case_of(architecture)
    unsharded = case.model().state_dict()
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**before))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    expected = torch.stack([tensor.double().norm() for tensor in dict(case.model().named_parameters()).values()]).norm()
    torch.testing.assert_close(full(total).double(), expected.detach(), rtol=1e-5, atol=0)
    optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    moments = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    trained = full_state_dict_by_torch(model)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    model.save_pretrained(folder + "-plain", state_dict=trained)

    other = parallelize(copy.deepcopy(case.model()), mesh_of(**after))
    states = torch.optim.AdamW(other.parameters(), lr=1e-3, foreach=False)
    target = dict(zip(("model", "optimizer"), get_state_dict(other, states), strict=True))
    dcp.load(target, checkpoint_id=folder)
    set_state_dict(other, states, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert_same(full_state_dict_by_torch(other), trained)
    loaded = get_optimizer_state_dict(other, states, options=options)["state"]
    for name, state in moments.items():
        torch.testing.assert_close(state["exp_avg"], 0.1 * unsharded[name], rtol=1e-5, atol=1e-7)
        assert torch.equal(loaded[name]["exp_avg"], state["exp_avg"]), name
    set_optimizer_state_dict(
        other, states, {"state": moments, "param_groups": target["optimizer"]["param_groups"]}, options=options
    )
    again = get_optimizer_state_dict(other, states, options=options)["state"]
    assert all(torch.equal(again[name]["exp_avg"], state["exp_avg"]) for name, state in moments.items())
    plain = copy.deepcopy(case.model())
    plain.load_state_dict(trained)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder + "-whole")
    dist.barrier()


def peak_of_export(**sizes: int) -> tuple[int, int]:
    """Return the peak memory of an export on this rank, and the size of a bucket."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=16, vocab_size=1024,
                         num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
    torch.manual_seed(0)
    model = parallelize(AutoModelForCausalLM.from_config(config), mesh_of(**sizes))
    bucket = 8 * 2**20
    adapter = model.state_dict_adapter
    assert len(list(adapter.iter_export(model, max_bytes=2**20))) == len(adapter.hub)  # connections, and their buffers
    with Peak() as peak:
        total = sum(tensor.nbytes for _, tensor in adapter.iter_export(model, max_bytes=bucket))
    assert total > 20 * bucket
    return peak.peak, bucket


def loads_and_saves(folder: str, again: str, **sizes: int) -> None:
    """Load a checkpoint and save it."""
    AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes)).save_pretrained(again)


def saves_as_one_process(folder: str, out: str, **sizes: int) -> None:
    """Load in shards, or completely and then shard. Save each in both formats, also from one process."""
    unsharded = AutoModelForCausalLM.from_pretrained(folder)
    models = {
        "loaded": AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes)),
        "sharded": parallelize(AutoModelForCausalLM.from_pretrained(folder), mesh_of(**sizes)),
    }
    for original in (True, False):
        options = {"max_shard_size": "700KB", "save_original_format": original}
        for name, model in models.items():
            model.save_pretrained(f"{out}/{name}-{original}", **options)
        if dist.get_rank() == 0:
            unsharded.save_pretrained(f"{out}/whole-{original}", **options)
        dist.barrier()


def saves_code_as_one_process(modules: str, out: str, **sizes: int) -> None:
    """Save a sharded model whose class in `modules` is registered with an auto class, also from one process."""
    sys.path.insert(0, modules)
    try:
        model_class = importlib.import_module("modeling_own").OwnForCausalLM
    finally:
        sys.path.remove(modules)
    model_class.register_for_auto_class("AutoModelForCausalLM")
    torch.manual_seed(0)
    unsharded = model_class.from_config(tiny_config(LlamaConfig), dtype=torch.float32)
    parallelize(copy.deepcopy(unsharded), mesh_of(**sizes)).save_pretrained(f"{out}/sharded")
    if dist.get_rank() == 0:
        unsharded.save_pretrained(f"{out}/whole")
    dist.barrier()


def exports_the_checkpoint(folder: str, **sizes: int) -> None:
    """Load in shards, or completely and then shard. Each must export and save the checkpoint's tensors."""
    tensors = load_file(f"{folder}/model.safetensors")
    models = {
        "loaded": AutoModelForImageTextToText.from_pretrained(folder, mesh=mesh_of(**sizes)),
        "sharded": parallelize(AutoModelForImageTextToText.from_pretrained(folder), mesh_of(**sizes)),
    }
    for name, model in models.items():
        assert_same(dict(model.state_dict_adapter.iter_export(model)), tensors)
        model.save_pretrained(f"{folder}/{name}")
        dist.barrier()
        assert_same(load_file(f"{folder}/{name}/model.safetensors"), tensors)
    save_checkpoint(f"{folder}/versions", models["loaded"])
    torch.manual_seed(0)
    new = parallelize(AutoModelForImageTextToText.from_config(models["loaded"].config), mesh_of(**sizes))
    assert new.state_dict_adapter.hub.keys() != tensors.keys()
    load_checkpoint(f"{folder}/versions", new)
    loaded = models["loaded"].state_dict()
    assert_same(
        {name: local(value) for name, value in new.state_dict().items()},
        {name: local(loaded[name]) for name in loaded},
    )


CHANGES: dict[str, Callable[[Any], object]] = {
    "head": lambda model: setattr(model, "lm_head", torch.nn.Identity()),
    "layers": lambda model: model.model.layers.__delitem__(-1),
    "buffer": lambda model: model.register_buffer("extra", torch.ones(3)),
    "norm": lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(torch.ones(5), requires_grad=False)),
}
"""Changes of a model's own tensors."""


def changed_after_sharding(folder: str, change: str, **sizes: int) -> list[str]:
    """Change a sharded model, and return the errors of exporting, viewing, saving and loading it."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    save_checkpoint(f"{folder}/resume", model)
    if "pp" not in sizes or dist.get_rank() == dist.get_world_size() - 1:  # the last stage has the head
        CHANGES[change](model)
    uses: list[Callable[[], object]] = [
        lambda: list(model.state_dict_adapter.iter_export(model)),
        lambda: model.save_pretrained(f"{folder}/saved"),
        lambda: save_checkpoint(f"{folder}/resume", model),
        lambda: load_checkpoint(f"{folder}/resume", model),
    ]
    if "pp" not in sizes:  # views do not communicate
        uses.append(lambda: model.state_dict_adapter.hf_views(model))
    errors = []
    for use in uses:
        with pytest.raises(ShardingError) as caught:
            use()
        errors.append(str(caught.value))
    return errors


def loads_without_head(**sizes: int) -> None:
    """A removed head does not hide that a state dict has its weight, and other tensors load."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    tensors = {name: tensor + 1 for name, tensor in case.model().state_dict().items()}
    CHANGES["head"](model)
    with pytest.raises(RuntimeError, match=r'Unexpected key.* "lm_head\.weight"'):
        model.load_state_dict(tensors)
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == ["lm_head.weight"]
    del tensors["lm_head.weight"]
    assert_same({name: full(tensor) for name, tensor in model.state_dict().items()}, tensors)


def exports_and_saves_after_cast(folder: str, before: torch.dtype, after: torch.dtype, **sizes: int) -> None:
    """Cast a sharded model. Compare exports and files with those of a model that is not sharded."""
    unsharded = copy.deepcopy(case_of("LlamaForCausalLM").model()).to(before)
    model = parallelize(copy.deepcopy(unsharded), mesh_of(**sizes))
    adapter = model.state_dict_adapter
    for each in (unsharded, model):
        each.to(after)
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.add_(2**-12)
    expected = dict(unsharded.state_dict_adapter.iter_export(unsharded))
    for each in (adapter, model.state_dict_adapter):
        assert_same(dict(each.iter_export(model)), expected)
    assert model.state_dict_adapter.export_plan() == unsharded.state_dict_adapter.export_plan()
    model.save_pretrained(folder)
    if dist.get_rank() == 0:
        unsharded.save_pretrained(folder + "-whole")
    dist.barrier()


def saves(folder: str, failing: str = "", **sizes: int) -> None:
    """Save a model. Optionally fail while a file is written (`file`), or a kept tensor is read (`kept tensor`)."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))

    def disk_full(*_: Any, **__: Any) -> torch.Tensor:
        raise OSError("disk full")

    if failing == "kept tensor":
        keep(model, {"a.weight": KeptTensor(TensorSpec((2,), torch.float32), (torch.zeros(2),), disk_full)})
    with mock.patch.object(saving, "save_file", disk_full if failing == "file" else saving.save_file):
        model.save_pretrained(folder, max_shard_size="700KB")


def pushes(folder: str, **sizes: int) -> None:
    """Save with options that sharded models do not support."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    model.save_pretrained(folder, push_to_hub=True)


def dies_while_saving(folder: str, dying: int, **sizes: int) -> None:
    """One rank exits after the first files are written."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    if dist.get_rank() == dying:
        shards.dist = SimpleNamespace(all_reduce=lambda *_, **__: os._exit(3))  # type: ignore[assignment]
    model.save_pretrained(folder, max_shard_size="700KB")


def dies_while_exporting(dying: int, **sizes: int) -> None:
    """One rank exits between two buckets."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    for number, _ in enumerate(model.state_dict_adapter.iter_export(model, max_bytes=300_000)):
        if number == 3 and dist.get_rank() == dying:
            os._exit(3)
