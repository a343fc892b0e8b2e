"""Models, batches, meshes and tensor helpers for the jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.errors import ShardingError
from nrl_models.testing.case import FamilyCase
from tools import variants

LENGTH = 12


def mesh_of(**sizes: int) -> DeviceMesh:
    """Create a mesh over all ranks with named dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def case_of(architecture: str, config: Mapping[str, Any] | None = None) -> FamilyCase:
    """Create a tiny case of a registered architecture, or of its variant, with other configuration values."""
    return variants.case_of(architecture, torch.device("cpu"), config)


def batches(case: FamilyCase, count: int) -> list[dict[str, Any]]:
    """Create one batch for each rank of `fsdp`."""
    return [case.inputs(batch=2, length=LENGTH, seed=seed, labels=True) for seed in range(count)]


def llama_case(config: dict[str, Any]) -> FamilyCase:
    """Create a tiny Llama case with other configuration values."""

    class Llama(registry.model_class("LlamaForCausalLM")):  # type: ignore[misc]
        tiny = config

    Llama.__name__ = Llama.__qualname__ = "LlamaForCausalLM"
    return FamilyCase(Llama, torch.device("cpu"))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, or any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that names and values are identical."""
    assert sorted(actual) == sorted(expected)
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different, different


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, case: FamilyCase, steps: range) -> list[float]:
    """Take optimizer steps on batches that depend only on the step. Returns the loss of each."""
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
    """Create AdamW with two groups, as trainers do: no weight decay for one-dimensional parameters."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def subjects_of_error(use: Callable[[], object]) -> tuple[str, ...]:
    """Call a function that must raise, because the model has changed since sharding. Returns what the error names."""
    with pytest.raises(ShardingError, match=r"parallelize\(model, mesh\)") as caught:
        use()
    return tuple(problem.subject for problem in caught.value.problems)
