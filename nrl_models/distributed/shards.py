"""The blocks of parameters, and of Hugging Face tensors, that this rank holds; whole tensors gathered from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nrl_models.common.state_dict.blocks import Block, through
from nrl_models.common.state_dict.buckets import buckets
from nrl_models.common.views.view import HFTensor
from nrl_models.distributed.mesh import has_stages, reporting_dead_ranks
from nrl_models.distributed.tensor.packed_shards import packing_of, regions_of

DEFAULT_BUCKET = 512 * 2**20
"""Bytes gathered at a time where nothing else is said."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: its shard of a `DTensor`, all of another."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_blocks(tensor: torch.Tensor) -> list[Block]:
    """This rank's blocks of one of the model's own tensors: all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return [Block((0,) * tensor.ndim, tensor)]
    return [Block(offset, local) for offset, local in regions_of(tensor)]


def share_of(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's share of `whole`, divided as `tensor` is.

    For optimisers that gather a gradient, compute a whole update, and keep their own share.

    Args:
        tensor: a parameter, gradient or state of a sharded model; a plain tensor is held whole.
        whole: of `tensor`'s shape, ordered as `tensor.full_tensor()` is.

    Returns:
        This rank's part of `whole`, of the shape of `tensor.to_local()`: a view, or a copy if a packed dimension (gate
        and up) is divided.
    """
    tensor = tensor.detach()
    parts = [block.of(whole) for block in own_blocks(tensor)]
    if len(parts) == 1:
        return parts[0]
    packing = packing_of(cast(DTensor, tensor))
    assert packing is not None
    return torch.cat(parts, packing.dim)


def blocks_of(tensor: HFTensor, own: Mapping[str, torch.Tensor]) -> list[Block]:
    """This rank's blocks of a Hugging Face tensor, over the memory of the model's own tensors."""
    result = []
    for piece in tensor.pieces:
        if piece.view.parameter not in own:  # another stage's
            continue
        whole = own[piece.view.parameter]
        blocks = [block for held in own_blocks(whole) for block in through(piece.view.steps, whole.shape, held)]
        for block in blocks:
            offset = list(block.offset)
            for method, args in piece.region:
                assert method == "narrow", f"{tensor.name}: {method} in a region"
                offset[args[0]] += args[1]
            result.append(Block(tuple(offset), block.tensor))
    return result


def divided_over(tensor: HFTensor, own: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> set[int]:
    """The mesh dimensions, by number, over which the ranks' blocks of a Hugging Face tensor differ."""
    divided: set[str] = {"pp"} if has_stages(mesh) else set()
    for name in tensor.parameters:
        if isinstance(whole := own.get(name), DTensor):  # or another stage's
            over = zip(whole.device_mesh.mesh_dim_names or (), whole.placements, strict=True)
            divided |= {dimension for dimension, placement in over if not placement.is_replicate()}
    return {dim for dim, dimension in enumerate(mesh.mesh_dim_names or ()) if dimension in divided}


def over_shard(whole: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor placed as `whole` is, over another local tensor of the same shape."""
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def gathered(
    own: Mapping[str, torch.Tensor],
    specs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, HFTensor],
    mesh: DeviceMesh,
    max_bytes: int,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole Hugging Face tensors, in the order of `tensors`, the same on every rank.

    Every rank has to go through all of it: each bucket is a collective. Values are bit for bit those of the shards.

    Args:
        own: the model's own tensors, by name: DTensors, or plain where every rank has them; of stages, those of which
            this rank is the first that has them.
        specs: tensors on meta like those of all ranks.
        tensors: what to yield.
        mesh: over which the DTensors are sharded.
        max_bytes: the size of a bucket, which lives as long as a tensor in it. One tensor that is larger gets a
            bucket of its own.
        device: of the buckets.
    """
    for buffer, bucket in buckets(tensors, specs, max_bytes, device):
        # Every rank puts its blocks into zeros, and the sum of all is the bucket. Summed as integers, to which nothing
        # but zeros is added: no rounding, and no sign of zero is lost.
        buffer.zero_()
        divided = {name: divided_over(tensors[name], own, mesh) for name in bucket}
        # Of tensors of other stages this rank does not know how they are divided.
        summed_over = range(mesh.ndim) if has_stages(mesh) else sorted(set().union(*divided.values()))
        for name, whole in bucket.items():
            # Of ranks that hold the same values only the first contributes.
            if all(dim in divided[name] or mesh.get_local_rank(dim) == 0 for dim in summed_over):
                for block in blocks_of(tensors[name], own):
                    block.put_into(whole)
        with reporting_dead_ranks("gather the model's tensors"):
            for dim in summed_over:
                dist.all_reduce(buffer.view(torch.int32), group=mesh.get_group(dim))
        yield from bucket.items()
