"""This rank's shards: the blocks of parameters, and of Hugging Face tensors, that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nrl_models.common.blocks import Block, through
from nrl_models.common.views import HFTensor
from nrl_models.errors import Problem, StateDictError

if TYPE_CHECKING:
    from nrl_models.distributed.sharding import Sharding


def own_block(tensor: torch.Tensor) -> Block:
    """This rank's block of one of the model's own tensors: all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return Block((0,) * tensor.ndim, tensor)
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    return Block(tuple(chunk.offsets) if local.numel() else (0,) * tensor.ndim, local)


def share_of(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`, taken from another whole tensor of its shape.

    For optimisers that gather a gradient, make an update of all of it, and keep their own share.

    Args:
        tensor: a parameter, gradient or state of a sharded model; a plain tensor is held whole.
        whole: of `tensor`'s shape, ordered as `tensor.full_tensor()` is.

    Returns:
        A view of `whole`, of the shape of `tensor.to_local()`.
    """
    return own_block(tensor.detach()).of(whole)


def blocks_of(tensor: HFTensor, own: Mapping[str, torch.Tensor]) -> list[Block]:
    """This rank's blocks of a Hugging Face tensor, over the memory of the model's own tensors."""
    result = []
    for piece in tensor.pieces:
        whole = own[piece.view.parameter]
        for block in through(piece.view.steps, whole.shape, own_block(whole)):
            offset = list(block.offset)
            for method, args in piece.region:
                assert method == "narrow", f"{tensor.name}: {method} in a region"
                offset[args[0]] += args[1]
            result.append(Block(tuple(offset), block.tensor))
    return result


def divided_over(tensor: HFTensor, own: Mapping[str, torch.Tensor]) -> set[int]:
    """The mesh dimensions, by number, over which the ranks' blocks of a Hugging Face tensor differ."""
    dims: set[int] = set()
    for name in tensor.parameters:
        if isinstance(whole := own[name], DTensor):
            dims |= {dim for dim, placement in enumerate(whole.placements) if not placement.is_replicate()}
    return dims


def over_shard(whole: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor placed as `whole` is, over another local tensor of the same shape."""
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def fill_shards(sharding: Sharding, model: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str) -> list[str]:
    """Replace, in `state_dict`, tensors under Hugging Face names by shards of the model's own.

    Nothing is communicated, unless a given tensor is itself a DTensor. What is given in part keeps the model's
    values for the rest.

    Args:
        sharding: the model's.
        model: the model that will load `state_dict`.
        state_dict: changed in place: whole tensors by Hugging Face name. Other names stay.
        prefix: what stands before every name of this model.

    Returns:
        The Hugging Face names of tensors that share a parameter with given ones, and are not given.

    Raises:
        StateDictError: shapes that do not fit, or a tensor given both combined and in parts.
    """
    own = sharding.own_tensors(model)
    adapter = sharding.adapter
    # A DTensor under an own name is loaded by torch. Whole tensors are Hugging Face's, whatever name they share.
    given = {
        key.removeprefix(prefix): key
        for key, value in state_dict.items()
        if key.startswith(prefix)
        and not (isinstance(value, DTensor) and key.removeprefix(prefix) in own)
        and not (key.removeprefix(prefix) in own and not isinstance(own[key.removeprefix(prefix)], DTensor))
    }
    table = adapter.hub | adapter.transformers
    targets = {key: table[name] for name, key in given.items() if name in table}
    problems = [
        Problem("unexpected", key, "is a combined tensor, whose rows depend on how the model is sharded")
        for name, key in given.items()
        if name in own and name not in table
    ]
    problems += [
        Problem("shape", key, f"has shape {tuple(state_dict[key].shape)}, the model expects {target.shape}")
        for key, target in targets.items()
        if tuple(state_dict[key].shape) != target.shape
    ]
    problems += [
        Problem("duplicated", key, f"is a part of {prefix + name}, which is given too")
        for key, target in targets.items()
        for name in target.parameters
        if prefix + name in state_dict and prefix + name != key
    ]
    if problems:
        advice = ["give whole tensors under Hugging Face names (state_dict_adapter.iter_export), or DTensors"]
        raise StateDictError(f"state dict does not fit {type(model).__name__.removeprefix('FSDP')}", problems, advice)
    filled: dict[str, torch.Tensor] = {}
    for key, target in targets.items():
        value = state_dict.pop(key)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        for name in target.parameters:
            if name not in filled:
                whole = own[name]
                copy = whole.to_local().clone() if isinstance(whole, DTensor) else whole.clone()
                filled[name] = over_shard(whole, copy) if isinstance(whole, DTensor) else copy
        for block in blocks_of(target, filled):
            block.take_from(value)
    state_dict |= {prefix + name: tensor for name, tensor in filled.items()}
    names = {target.name for target in targets.values()}
    layout = "transformers" if names <= adapter.transformers.keys() else "hub"
    inside = {target.name for name in filled for target in adapter.tensors_in(name, layout)}
    return [prefix + name for name in sorted(inside - names)]
