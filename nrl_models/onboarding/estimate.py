"""Estimate memory and communication of a model on each rank of a mesh, from its configuration only.

The model is built on meta and sharded by the code for real models, over torch's `fake` process group, so its parameter
sizes are exact. A forward and a backward on meta show the stored activations and the communication. Only expert stacks,
which depend on the data, are counted by formula, assuming balanced routing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.auto import auto_class_of
from nrl_models.common.config.positions import model_limit
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.mesh import has_stages, size_of
from nrl_models.distributed.parallelize import cut_for, divide_data, divide_stages
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import local_of
from nrl_models.errors import Problem, ProblemKind, ShardingError
from nrl_models.onboarding.estimate_step import Setting, run_step, units_of_model


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one rank, and bytes it sends in one step of one micro-batch; under `pp` on the rank that takes most.

    Attributes:
        parameters, gradients, optimizer: kept; the optimizer is AdamW, with two states of a parameter's size.
        gathered: parameters and gradients that `fsdp` holds whole at a time: two units and the outermost one; under
            `pp` the gradients of all, until the last micro-batch.
        activations: kept from forward to backward, and recomputed at a time; under `pp` see `OneStage`.
        buffers: the model's buffers.
        traffic: bytes a rank sends, by dimension of the mesh.
        total_parameters: of the whole model, as a number.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    buffers: int
    traffic: Mapping[str, int]
    total_parameters: int

    @property
    def total(self) -> int:
        """All memory at its peak."""
        kept = self.parameters + self.gradients + self.optimizer + self.buffers
        return kept + self.gathered + self.activations


def estimate(config: PreTrainedConfig, setting: Setting) -> Estimate:
    """Estimate what the model of a configuration takes on a rank of a mesh.

    Raises:
        ShardingError: the mesh does not divide the model, or this process is in a process group already.
    """
    ranks = range(setting.mesh.get("pp", 1))
    return max((_on_rank(rank, config, setting) for rank in ranks), key=lambda found: found.total)


def estimate_within(config: PreTrainedConfig, setting: Setting, memory: int) -> Estimate | None:
    """Estimate as `estimate` does; None if a rank takes more than `memory` bytes.

    Stops as soon as that is known: the forward and backward pass on meta, most of the time, often need not run.

    Raises:
        ShardingError: the mesh does not divide the model, or this process is in a process group already.
    """
    found: list[Estimate] = []
    for rank in range(setting.mesh.get("pp", 1)):
        try:
            found.append(_on_rank(rank, config, setting, memory))
        except _TooLargeError:
            return None
    largest = max(found, key=lambda estimate: estimate.total)
    return largest if largest.total <= memory else None


class _TooLargeError(Exception):
    """Parameters, states and gathered layers alone exceed the memory."""


def _on_rank(rank: int, config: PreTrainedConfig, setting: Setting, memory: int | None = None) -> Estimate:
    """Estimate a rank of `pp`; without `pp` all ranks take the same.

    Raises:
        _TooLargeError: more than `memory` bytes are needed without activations.
    """
    inner = math.prod(size for name, size in setting.mesh.items() if name != "pp")
    with _fake_mesh(setting.mesh, rank * inner) as mesh:
        kept, whole = _sharded(config, setting.dtype, mesh)
        divide_data(kept, sharding_of(kept))
        local = _local_bytes(kept)
        computing, _ = _sharded(config, setting.compute, mesh)
        fsdp_traffic, gathered = _data_parallel(computing, mesh)
        if memory is not None and 4 * local + gathered > memory:
            raise _TooLargeError
        try:
            activations, traffic = run_step(computing, setting, mesh)
        except (RuntimeError, IndexError) as error:  # learned positions end at the limit, others go on
            limit = model_limit(config)
            if limit is None or setting.seq_len <= limit:
                raise
            detail = f"{setting.seq_len:,} tokens, but the model's limit is {limit:,}"
            problem = Problem(ProblemKind.CONFIG, "sequence length", detail, advice=f"pass --seq-len {limit}")
            raise ShardingError("cannot estimate this sequence length", [problem]) from error
        total = sum(parameter.numel() for parameter in whole.parameters())
    if "fsdp" in mesh.mesh_dim_names:  # type: ignore[operator]
        traffic = {"fsdp": fsdp_traffic, **traffic}
    buffers = sum(buffer.nbytes for buffer in kept.buffers())
    return Estimate(local, local, 2 * local, gathered, activations, buffers, traffic, total)


@contextmanager
def _fake_mesh(sizes: Mapping[str, int], rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh whose ranks do not exist, except for this process."""
    if dist.is_initialized():
        problem = Problem(ProblemKind.MESH, "this process", "is in a process group; estimates need a separate one")
        raise ShardingError("cannot estimate here", [problem], ["run nrl-models plan as a separate process"])
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes.values()))
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def _sharded(config: PreTrainedConfig, dtype: torch.dtype, mesh: DeviceMesh) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model on meta, without the tables that loading and saving need, and it with the stages of other ranks.

    Its layers, linears and experts are divided.
    """
    model = auto_class_of(config).from_config(config, device="meta", dtype=dtype).train()
    plan = plan_for(model, mesh)
    model.sharding, whole = divide_stages(model, mesh, plan, cut_for(model, mesh, plan))
    return model, whole


def _local_bytes(model: nn.Module) -> int:
    return sum(local_of(parameter).nbytes for parameter in model.parameters())


def _data_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> tuple[int, int]:
    """Bytes that `fsdp` sends for a micro-batch, and bytes it holds gathered at a time."""
    ranks, micro_batches = size_of(mesh, "fsdp"), size_of(mesh, "pp")
    if ranks == 1:
        return 0, 0
    whole = _local_bytes(model)
    sizes = [_local_bytes(unit) for unit in units_of_model(model)]
    outermost, largest = whole - sum(sizes), max(sizes, default=0)
    # Parameters before the forward and, having been freed, before the backward; gradients after the last one.
    sent = (2 * micro_batches + 1) * whole * (ranks - 1) // ranks // micro_batches
    # The unit that computes, the one gathered ahead, and gradients of one; and the outermost, with its gradients.
    # Gradients are not divided before the last micro-batch.
    gradients = whole if has_stages(mesh) else largest + outermost
    return sent, 2 * largest + outermost + gradients
