"""Wrappers and checkpoints of torch.distributed, with a world size of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from edits.outcome import Outcome
from edits.table import Subject, edit, forward, gradients, step, values
from edits.training import loss_of

FULL = StateDictOptions(full_state_dict=True)


@contextmanager
def world_of_one(folder: Path) -> Iterator[None]:
    """Initialize gloo with one process and a file store."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_a_world(apply: Callable[[Subject], Outcome]) -> Callable[[Subject], Outcome]:
    """Run the edit with a world size of one."""

    def within(subject: Subject) -> Outcome:
        with world_of_one(subject.folder):
            return apply(subject)

    within.__name__, within.__module__ = apply.__name__, apply.__module__
    return within


def whole(value: Outcome) -> Outcome:
    """Gather sharded tensors in nested dicts."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(subject: Subject, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(subject, model).backward()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in fp64, for the reason given in the optimizer edits."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# State dicts and files of DCP


@edit(dtype=torch.float64)
def dcp_gives_full_state_dicts(subject: Subject) -> Outcome:
    optimizer = adamw(subject.model)
    trained(subject, subject.model, optimizer)
    return {
        "model": get_model_state_dict(subject.model, options=FULL),
        "optimizer": get_optimizer_state_dict(subject.model, optimizer, options=FULL),
    }


@edit(dtype=torch.float64)
def dcp_gives_flat_optimizer_states(subject: Subject) -> Outcome:
    optimizer = adamw(subject.model)
    trained(subject, subject.model, optimizer)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(subject.model, optimizer, options=options)


@edit(dtype=torch.float64)
def dcp_sets_state_dicts_of_other_library(subject: Subject) -> Outcome:
    first, second = adamw(subject.model), None
    trained(subject, subject.model, first)
    other = subject.other()
    second = adamw(other)
    model_state, optimizer_state = get_state_dict(subject.model, first, options=FULL)
    set_model_state_dict(other, model_state, options=FULL)
    set_optimizer_state_dict(other, second, optimizer_state, options=FULL)
    trained(subject, other, second, 1)
    return {"values": values(other), "states": get_optimizer_state_dict(other, second, options=FULL)}


@edit(dtype=torch.float64)
def dcp_files_are_loaded_by_other_library(subject: Subject) -> Outcome:
    optimizer = adamw(subject.model)
    trained(subject, subject.model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(subject.model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=subject.folder / "saved", no_dist=True)
    keys = dcp.FileSystemReader(subject.folder / "saved").read_metadata().state_dict_metadata
    other = subject.other()
    second = adamw(other)
    wanted = dict(zip(("model", "optimizer"), get_state_dict(other, second), strict=True))
    dcp.load(wanted, checkpoint_id=subject.folder / "saved", no_dist=True)
    set_model_state_dict(other, wanted["model"])
    set_optimizer_state_dict(other, second, wanted["optimizer"])
    trained(subject, other, second, 1)
    return {"keys": sorted(keys), "values": values(other)}


@edit()
def dcp_of_trainable_parameters_only(subject: Subject) -> Outcome:
    subject.model.requires_grad_(False)
    subject.v.requires_grad_(True)
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    return get_model_state_dict(subject.model, options=options)


@edit()
def dcp_of_some_modules(subject: Subject) -> Outcome:
    return get_model_state_dict(subject.model, submodules={subject.attention}, options=FULL)


# Wrappers


@edit(dtype=torch.float64)
@in_a_world
def ddp_trains(subject: Subject) -> Outcome:
    model = DistributedDataParallel(subject.model)
    trained(subject, model, adamw(model))
    return {"names": [name for name, _ in model.named_parameters()], "values": values(subject.model)}


@edit()
@in_a_world
def ddp_with_gradients_as_views_of_buckets(subject: Subject) -> Outcome:
    model = DistributedDataParallel(subject.model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(subject, model, optimizer, 3)
    return {"values": values(subject.model), "gradients": gradients(subject.model)}


@edit()
@in_a_world
def ddp_finds_parameters_that_are_not_used(subject: Subject) -> Outcome:
    subject.model.model.layers[0].mlp.forward = lambda x: x
    model = DistributedDataParallel(subject.model, find_unused_parameters=True)
    loss_of(subject, model).backward()
    return {"gradients": gradients(subject.model)}


@edit()
@in_a_world
def ddp_with_frozen_linear(subject: Subject) -> Outcome:
    subject.k.requires_grad_(False)
    model = DistributedDataParallel(subject.model)
    with model.no_sync():
        loss_of(subject, model).backward()
    loss_of(subject, model).backward()
    return {"gradients": gradients(subject.model)}


@edit()
@in_a_world
def ddp_with_hook_on_its_communication(subject: Subject) -> Outcome:
    """Gradients are halved during communication."""

    def hook(state, bucket):  # DDP reads annotations, but not strings
        halved: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        halved.set_result(bucket.buffer() * 0.5)
        return halved

    model = DistributedDataParallel(subject.model)
    model.register_comm_hook(None, hook)
    loss_of(subject, model).backward()
    return {"gradients": gradients(subject.model)}


@edit(dtype=torch.float64)
@in_a_world
def fsdp2_trains(subject: Subject) -> Outcome:
    """torch's `fully_shard`, layer by layer."""
    mesh = init_device_mesh("cpu", (1,))
    for layer in subject.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(subject.model, mesh=mesh)
    optimizer = adamw(subject.model)
    trained(subject, subject.model, optimizer)
    return {
        "names": [name for name, _ in subject.model.named_parameters()],
        "values": whole(dict(subject.model.state_dict())),
        "states": get_optimizer_state_dict(subject.model, optimizer, options=FULL),
    }


@edit()
@in_a_world
def fsdp2_of_linears(subject: Subject) -> Outcome:
    """Each linear is a separate FSDP unit: q is gathered when k is not."""
    mesh = init_device_mesh("cpu", (1,))
    for part in (subject.q, subject.k, subject.v, subject.up):
        fully_shard(part, mesh=mesh)
    fully_shard(subject.model, mesh=mesh, reshard_after_forward=True)
    loss = loss_of(subject)
    loss.backward()
    return {"loss": loss.detach(), "gradients": whole(gradients(subject.model))}


@edit(half=True)
@in_a_world
def fsdp2_in_mixed_precision(subject: Subject) -> Outcome:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    for layer in subject.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(subject.model, mesh=mesh, mp_policy=policy)
    loss_of(subject).backward()
    return {"gradients": whole(gradients(subject.model))}


@edit(dtype=torch.float64)
@in_a_world
def fsdp1_trains(subject: Subject) -> Outcome:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    model = FullyShardedDataParallel(
        subject.model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = adamw(model)
    trained(subject, model, optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        values_of_model = values(subject.model)
    return {"names": [name for name, _ in model.named_parameters()], "values": values_of_model}


@edit(dtype=torch.float64)
@in_a_world
def tensor_parallel_by_torch(subject: Subject) -> Outcome:
    """torch's own parallel styles on an MLP."""
    mesh = init_device_mesh("cpu", (1,))
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(subject.mlp, mesh, plan)
    x = subject.hidden_states()
    output = subject.mlp(x)
    output.square().sum().backward()
    return {"output": output.detach(), "gradients": whole(gradients(subject.mlp)), "logits": forward(subject)}


@edit()
@in_a_world
def parameters_are_broadcast_by_name(subject: Subject) -> Outcome:
    """Broadcast parameters by name, as trainers send weights to engines."""
    seen = []
    for name, parameter in subject.model.named_parameters():
        dist.broadcast(parameter.data, 0)
        seen.append((name, str(parameter.dtype), tuple(parameter.shape)))
    return {**step(subject), "seen": seen}


@edit()
@in_a_world
def gradients_are_reduced_in_place(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    for parameter in subject.model.parameters():
        dist.all_reduce(parameter.grad)
    dist.all_reduce_coalesced([parameter.grad for parameter in subject.model.parameters()])
    return gradients(subject.model)
