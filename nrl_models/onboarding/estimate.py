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
    """Bytes on one rank, and bytes it sends in one step of one micro-batch. With `pp`, of the largest rank.

    Attributes:
        parameters, gradients, optimizer: Kept in memory. The optimizer is AdamW, with two states of a parameter's size.
        gathered: Parameters and gradients that `fsdp` has gathered at once: two units and the outermost one. With `pp`,
            the gradients of all units, until the last micro-batch.
        activations: Kept from forward to backward, plus the recomputed ones of one unit. With `pp` see `OneStage`.
        buffers: Buffers of the model.
        traffic: Bytes that a rank sends, by dimension of the mesh.
        total_parameters: Number of parameters of the complete model.
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
        """Peak memory."""
        model_states = self.parameters + self.gradients + self.optimizer + self.buffers
        return model_states + self.gathered + self.activations


def estimate(config: PreTrainedConfig, setting: Setting) -> Estimate:
    """Estimate the memory and communication of a rank of a mesh, for the model of a configuration.

    Raises:
        ShardingError: If the mesh does not divide the model, or this process is already in a process group.
    """
    ranks = range(setting.mesh.get("pp", 1))
    return max((_on_rank(rank, config, setting) for rank in ranks), key=lambda rank_estimate: rank_estimate.total)


def estimate_within(config: PreTrainedConfig, setting: Setting, memory: int) -> Estimate | None:
    """Return the result of `estimate`, or None if a rank needs more than `memory` bytes.

    Stops as soon as the limit is exceeded. Often the forward and backward on meta, the slowest steps, do not run.

    Raises:
        ShardingError: If the mesh does not divide the model, or this process is already in a process group.
    """
    estimates: list[Estimate] = []
    for rank in range(setting.mesh.get("pp", 1)):
        try:
            estimates.append(_on_rank(rank, config, setting, memory))
        except _TooLargeError:
            return None
    largest = max(estimates, key=lambda estimate: estimate.total)
    return largest if largest.total <= memory else None


class _TooLargeError(Exception):
    """Parameters, optimizer states and gathered layers alone exceed the memory."""


def _on_rank(rank: int, config: PreTrainedConfig, setting: Setting, memory: int | None = None) -> Estimate:
    """Estimate a rank of `pp`. Without `pp`, all ranks need the same memory.

    Raises:
        _TooLargeError: If more than `memory` bytes are needed without activations.
    """
    inner = math.prod(size for name, size in setting.mesh.items() if name != "pp")
    with _fake_mesh(setting.mesh, rank * inner) as mesh:
        model, full_model = _sharded(config, setting.dtype, mesh)
        divide_data(model, sharding_of(model))
        local = _local_bytes(model)
        computing, _ = _sharded(config, setting.compute, mesh)
        fsdp_traffic, gathered = _data_parallel(computing, mesh)
        if memory is not None and 4 * local + gathered > memory:
            raise _TooLargeError
        try:
            activations, traffic = run_step(computing, setting, mesh)
        except (RuntimeError, IndexError) as error:  # models with learned positions fail beyond their limit
            limit = model_limit(config)
            if limit is None or setting.seq_len <= limit:
                raise
            detail = f"{setting.seq_len:,} tokens, but the model's limit is {limit:,}"
            problem = Problem(ProblemKind.CONFIG, "sequence length", detail, advice=f"pass --seq-len {limit}")
            raise ShardingError("cannot estimate this sequence length", [problem]) from error
        total = sum(parameter.numel() for parameter in full_model.parameters())
    if "fsdp" in mesh.mesh_dim_names:  # type: ignore[operator]
        traffic = {"fsdp": fsdp_traffic, **traffic}
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return Estimate(local, local, 2 * local, gathered, activations, buffers, traffic, total)


@contextmanager
def _fake_mesh(sizes: Mapping[str, int], rank: int = 0) -> Iterator[DeviceMesh]:
    """Create a mesh over a `fake` process group. Only this process exists, other ranks do not."""
    if dist.is_initialized():
        problem = Problem(ProblemKind.MESH, "this process", "is in a process group; estimates need a separate one")
        raise ShardingError("cannot estimate here", [problem], ["run nrl-models plan as a separate process"])
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes.values()))
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def _sharded(config: PreTrainedConfig, dtype: torch.dtype, mesh: DeviceMesh) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build a sharded model on meta, without the tables for loading and saving.

    Returns:
        This rank's part of the model, and the model with the stages of all ranks. Both have divided layers, linears and
        experts.
    """
    model = auto_class_of(config).from_config(config, device="meta", dtype=dtype).train()
    plan = plan_for(model, mesh)
    model.sharding, full_model = divide_stages(model, mesh, plan, cut_for(model, mesh, plan))
    return model, full_model


def _local_bytes(model: nn.Module) -> int:
    return sum(local_of(parameter).nbytes for parameter in model.parameters())


def _data_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the bytes that `fsdp` sends per micro-batch, and the largest number of bytes that are gathered at once."""
    ranks, micro_batches = size_of(mesh, "fsdp"), size_of(mesh, "pp")
    if ranks == 1:
        return 0, 0
    model_bytes = _local_bytes(model)
    sizes = _bytes_of_units(model)
    outermost, largest = model_bytes - sum(sizes), max(sizes, default=0)
    # Sent: parameters before the forward and before the backward (they were freed), gradients after the last backward.
    sent = (2 * micro_batches + 1) * model_bytes * (ranks - 1) // ranks // micro_batches
    # Gathered: the unit that runs, the next unit, and the gradients of one; and the outermost unit with its gradients.
    # Gradients are not divided before the last micro-batch.
    gradients = model_bytes if has_stages(mesh) else largest + outermost
    return sent, 2 * largest + outermost + gradients


def _bytes_of_units(model: PreTrainedModel) -> list[int]:
    """Return the bytes of each unit, without the parameters of units inside it, or of another unit that shares them."""
    sizes: list[int] = []
    counted: set[int] = set()
    for unit in reversed(units_of_model(model)):
        parameter_bytes = {id(parameter): local_of(parameter).nbytes for parameter in unit.parameters()}
        sizes.append(sum(nbytes for key, nbytes in parameter_bytes.items() if key not in counted))
        counted |= parameter_bytes.keys()
    return sizes
