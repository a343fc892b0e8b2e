"""What the processes of a world do: each function runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.distributed import parallelize
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
