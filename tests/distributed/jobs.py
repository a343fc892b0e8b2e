"""What the processes of a world do: each function runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.testing.case import FamilyCase

LENGTH = 12


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh over all ranks, with named dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def case_of(architecture: str) -> FamilyCase:
    """The tiny model of a registered architecture."""
    return FamilyCase(registry.model_class(architecture), torch.device("cpu"))


def batches(case: FamilyCase, count: int) -> list[dict[str, Any]]:
    """One batch for each rank of `fsdp`."""
    return [case.inputs(batch=2, length=LENGTH, seed=seed, labels=True) for seed in range(count)]


def expected(case: FamilyCase, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process over all batches, by Hugging Face name."""
    model = copy.deepcopy(case.model()).train()
    losses = [model(**batch, use_cache=False).loss / count for batch in batches(case, count)]
    torch.stack(losses).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return sum(loss.item() for loss in losses), model.state_dict_adapter.to_hf(gradients)


def step(model: PreTrainedModel, case: FamilyCase) -> float:
    """One forward and backward on this rank's batch; the loss over all."""
    mesh = model.sharding.mesh
    batch = batches(case, size_of(mesh, "fsdp"))[rank_in(mesh, "fsdp")]
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def whole_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The gradients of a sharded model, whole, by Hugging Face name."""
    own = {name: one.grad.full_tensor() for name, one in model.named_parameters() if one.grad is not None}
    return model.state_dict_adapter.to_hf(own)


def equals_one_process(architecture: str, **sizes: int) -> dict[str, float]:
    """How far loss and gradients of a sharded model are from one process's."""
    case = case_of(architecture)
    mesh = mesh_of(**sizes)
    loss, gradients = expected(case, size_of(mesh, "fsdp"))
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    actual = step(model, case)
    found = whole_gradients(model)
    assert sorted(found) == sorted(gradients)
    worst = max(float((found[name] - gradients[name]).abs().max()) for name in gradients)
    scale = max(float(one.abs().max()) for one in gradients.values())
    return {"loss": abs(actual - loss), "gradients": worst, "scale": scale}


def exports_and_saves(architecture: str, folder: str, **sizes: int) -> None:
    """A sharded model exports, shows and saves exactly what one process does; and loads it back."""
    case = case_of(architecture)
    whole = copy.deepcopy(case.model())
    adapter = whole.state_dict_adapter
    reference = dict(adapter.iter_export(whole))
    model = parallelize(copy.deepcopy(whole), mesh_of(**sizes))
    for layout in ("hub", "transformers"):
        reference = dict(adapter.iter_export(whole, layout=layout))
        exported = list(model.state_dict_adapter.iter_export(model, max_bytes=300_000, layout=layout))
        assert [name for name, _ in exported] == list(reference)
        assert_same(dict(exported), reference)
        views = model.state_dict_adapter.hf_views(model, layout=layout)
        assert_same({name: full(view) for name, view in views.items()}, {name: reference[name] for name in views})
        gathered = {name: full(tensor) for name, tensor in model.state_dict().items()}
        assert_same(
            model.state_dict_adapter.to_hf(gathered, layout=layout), adapter.to_hf(whole.state_dict(), layout=layout)
        )
    model.save_pretrained(folder, max_shard_size="700KB")
    if dist.get_rank() == 0:
        whole.save_pretrained(folder + "-whole", max_shard_size="700KB")
    dist.barrier()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    loaded = model.load_state_dict(adapter.to_hf(whole.state_dict()))
    assert not loaded.missing_keys
    assert_same(dict(model.state_dict_adapter.iter_export(model)), dict(adapter.iter_export(whole)))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and values bit for bit."""
    assert sorted(actual) == sorted(expected)
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different, different


def loads(folder: str, architecture: str, **sizes: int) -> dict[str, Any]:
    """Load a checkpoint sharded; it holds what one process loads, and computes the same."""
    case = case_of(architecture)
    mesh = mesh_of(**sizes)
    whole = case.model_class.from_pretrained(folder)
    model = case.model_class.from_pretrained(folder, mesh=mesh, plan="auto")
    assert not model.training
    for layout in ("hub", "transformers"):
        expected = dict(whole.state_dict_adapter.iter_export(whole, layout=layout))
        assert_same(dict(model.state_dict_adapter.iter_export(model, layout=layout)), expected)
    assert_same(dict(model.named_buffers()), dict(whole.named_buffers()))
    assert {name: one.dtype for name, one in model.named_parameters()} == dtypes_of(whole, model)
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None:
        tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
        assert (head.weight is words.weight) is tied
    inputs = case.inputs()
    with torch.no_grad():
        difference = (model(**inputs).logits - whole(**inputs).logits).abs().max().item()
    nbytes = sum(tensor.nbytes for tensor in whole.state_dict_adapter.to_hf(whole.state_dict()).values())
    return {"logits": difference, "read": model.sharding.loaded_bytes / nbytes}


def dtypes_of(whole: PreTrainedModel, model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The dtypes that a sharded model's parameters should have."""
    hf = {
        name: tensor.dtype
        for name, tensor in whole.state_dict_adapter.to_hf(whole.state_dict(), layout="transformers").items()
    }
    parts = model.state_dict_adapter.parts
    return {name: hf[parts[name][0]] for name, _ in model.named_parameters()}


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, case: FamilyCase, steps: range) -> list[float]:
    """Optimiser steps on batches that depend on the step alone; the loss of each."""
    losses = []
    for number in steps:
        optimizer.zero_grad()
        loss = model(**case.inputs(batch=2, length=LENGTH, seed=number, labels=True), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    """AdamW with two groups, as trainers make it: no decay for what has one dimension."""
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)


def train_and_save(folder: str, architecture: str, **sizes: int) -> list[float]:
    """Two steps, a checkpoint, and two more steps; all losses."""
    case = case_of(architecture)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    losses = train(model, optimizer, case, range(2))
    save_checkpoint(folder, model, optimizer, {"step": 2})
    return losses + train(model, optimizer, case, range(2, 4))


def resume(folder: str, architecture: str, combine: bool = True, **sizes: int) -> list[float]:
    """The two steps after the checkpoint, by a model that began with other weights."""
    case = case_of(architecture)
    torch.manual_seed(7)
    model = case.model_class.from_config(case.config, combine=combine).train()
    model = parallelize(model, mesh_of(**sizes))
    optimizer = new_optimizer(model)
    optimizer.param_groups[0]["lr"] = 7.0
    progress = load_checkpoint(folder, model, optimizer)
    assert progress == {"step": 2}
    assert optimizer.param_groups[0]["lr"] == 1e-3
    return train(model, optimizer, case, range(progress["step"], 4))
