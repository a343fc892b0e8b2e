"""State shared by pipeline stages: gradients of parameters that several stages hold, and the gradient norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nrl_models.common.modules import own_parameters
from nrl_models.distributed.mesh import rank_in
from nrl_models.distributed.sharding import Sharding, require_module, sharded_model, sharding_of
from nrl_models.distributed.shards import full_of, local_of


@contextmanager
def shared_gradients_summed(model: PreTrainedModel, mesh: DeviceMesh) -> Iterator[None]:
    """Sum the gradients of parameters that several ranks hold, because they are tied or several stages use them.

    With this, the parameters stay equal on all of these ranks with any optimizer. Gradients from before the step are
    already equal, and are added once.
    """
    shared = held_by_several(model)
    before = [parameter.grad for parameter, _ in shared]
    for parameter, _ in shared:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for (parameter, _), earlier in zip(shared, before, strict=True):
            parameter.grad = earlier
        raise
    for (parameter, ranks), earlier in zip(shared, before, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _sum_over(local_of(parameter.grad), ranks, mesh)
        if earlier is not None:
            parameter.grad += earlier


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradients of a model by their total norm over all stages.

    `torch.nn.utils.clip_grad_norm_` only uses the gradients of a rank's own stages, so factors would differ.

    Args:
        model: A model. Without `pp`, sharded or not, it gets torch's result. Every rank has to call this.
        max_norm: Maximum gradient norm.

    Returns:
        The norm before clipping, equal on every rank.

    Raises:
        ShardingError: If `model` wraps a model with stages and has other parameters.
        UnknownArgumentError: If `model` is not a module: torch's function takes parameters, this one the model.
    """
    require_module(model, "clip_grad_norm_(model, max_norm), without .parameters()")
    shardings = [vars(module).get("sharding") for module in model.modules()]
    if not any(isinstance(sharding, Sharding) and sharding.stages is not None for sharding in shardings):
        return full_of(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    inner = sharded_model(model)
    sharding, held = sharding_of(inner), dict(own_parameters(inner))
    assert sharding.stages is not None
    gradients = {name: parameter.grad for name, parameter in held.items() if parameter.grad is not None}
    counted = [grad for name, grad in gradients.items() if sharding.is_first_holder(name)]
    norm = full_of(torch.nn.utils.get_total_norm(counted))
    squares = norm.to(sharding.stages.device, torch.float32).square()
    dist.all_reduce(squares, group=sharding.mesh.get_group("pp"))
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(held.values(), max_norm, norm)
    return norm


def held_by_several(model: PreTrainedModel) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Return this rank's parameters that other ranks also hold, with these ranks. Every rank has the same order."""
    sharding = sharding_of(model)
    assert sharding.stages is not None
    parameters = dict(own_parameters(model))
    shared = []
    for names, stages in sharding.stages.cut.shared.items():
        ranks = tuple(sorted({sharding.rank_of_stage(stage) for stage in stages}))
        parameter = next((parameters[name] for name in names if name in parameters), None)
        if parameter is not None and parameter.requires_grad and len(ranks) > 1:
            shared.append((parameter, ranks))
    return shared


def _sum_over(tensor: torch.Tensor, ranks: tuple[int, ...], mesh: DeviceMesh) -> None:
    """Sum a tensor over some ranks of `pp`, in place. The first rank computes the sum, so all have identical bits."""
    group, this_rank = mesh.get_group("pp"), rank_in(mesh, "pp")
    first, *others = ranks
    if this_rank != first:
        dist.send(tensor, group=group, group_dst=first)
        dist.recv(tensor, group=group, group_src=first)
        return
    received = torch.empty_like(tensor)
    for rank in others:
        dist.recv(received, group=group, group_src=rank)
        tensor += received
    for rank in others:
        dist.send(tensor, group=group, group_dst=rank)
