"""The blocks of parameters, and of Hugging Face tensors, that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from nrl_models.common.state_dict.blocks import Block, through
from nrl_models.common.state_dict.views import HFTensor


def own_block(tensor: torch.Tensor) -> Block:
    """This rank's block of one of the model's own tensors: all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return Block((0,) * tensor.ndim, tensor)
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    return Block(tuple(chunk.offsets) if local.numel() else (0,) * tensor.ndim, local)


def share_of(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's share of `whole`, divided as `tensor` is.

    For optimisers that gather a gradient, compute a whole update, and keep their own share.

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
