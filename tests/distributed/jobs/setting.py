"""Models, batches and meshes that jobs begin with, and how they look at tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.testing.case import FamilyCase

LENGTH = 12


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh over all ranks, with named dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def case_of(architecture: str, config: Mapping[str, Any] | None = None) -> FamilyCase:
    """The tiny model of a registered architecture, with other values in its configuration."""
    return FamilyCase(registry.model_class(architecture), torch.device("cpu"), config or {})


def batches(case: FamilyCase, count: int) -> list[dict[str, Any]]:
    """One batch for each rank of `fsdp`."""
    return [case.inputs(batch=2, length=LENGTH, seed=seed, labels=True) for seed in range(count)]


def llama_case(config: dict[str, Any]) -> FamilyCase:
    """A tiny Llama with other values in its configuration."""

    class Llama(registry.model_class("LlamaForCausalLM")):  # type: ignore[misc]
        tiny = config

    Llama.__name__ = Llama.__qualname__ = "LlamaForCausalLM"
    return FamilyCase(Llama, torch.device("cpu"))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and values bit for bit."""
    assert sorted(actual) == sorted(expected)
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different, different


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
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
