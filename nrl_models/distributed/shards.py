"""Blocks of parameters and Hugging Face tensors on this rank, and gathering of complete tensors from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nrl_models.common.state_dict.buckets import BufferPool, bucket_buffers, copy_all
from nrl_models.common.views.view import HFTensor, offset_through
from nrl_models.common.views.view_blocks import Block, through
from nrl_models.distributed.mesh import has_stages, reporting_dead_ranks
from nrl_models.distributed.tensor.packed_shards import packing_of, regions_of

DEFAULT_BUCKET = 512 * 2**20
"""Default bytes per gathered bucket."""

GATHER = "gather the model's tensors"
"""The action in errors of `gathered`."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a `DTensor`, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a `DTensor` gathered from all ranks, or the tensor itself. Every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_blocks(tensor: torch.Tensor) -> list[Block]:
    """Return this rank's blocks of one of the model's own tensors; a single one if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return [Block((0,) * tensor.ndim, tensor)]
    return regions_of(tensor)


def share_of(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `whole`, sharded like `tensor`.

    For optimizers that gather a gradient, compute the complete update, and apply their shard of it.

    Args:
        tensor: A parameter, gradient or state of a sharded model. For a plain tensor, `whole` is returned.
        whole: Unsharded tensor of `tensor`'s shape, in the order of `tensor.full_tensor()`.

    Returns:
        This rank's shard, with the shape of `tensor.to_local()`: a view, or a copy if a packed dimension (gate and up)
        is sharded.
    """
    tensor = tensor.detach()
    parts = [block.of(whole) for block in own_blocks(tensor)]
    if len(parts) == 1:
        return parts[0]
    packing = packing_of(cast(DTensor, tensor))
    assert packing is not None
    return torch.cat(parts, packing.dim)


def blocks_of(tensor: HFTensor, local_state: Mapping[str, torch.Tensor]) -> list[Block]:
    """Return this rank's blocks of a Hugging Face tensor, over the memory of the model's own tensors."""
    result = []
    for piece in tensor.pieces:
        if piece.view.parameter not in local_state:  # of another stage
            continue
        parameter = local_state[piece.view.parameter]
        blocks = [block for held in own_blocks(parameter) for block in through(piece.view.steps, parameter.shape, held)]
        result += [Block(offset_through(piece.region, block.offset), block.tensor) for block in blocks]
    return result


def divided_over(tensor: HFTensor, local_state: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> set[int]:
    """Return the mesh dimensions, by number, over which ranks have different blocks of a Hugging Face tensor."""
    divided: set[str] = {"pp"} if has_stages(mesh) else set()
    for name in tensor.parameters:
        if isinstance(parameter := local_state.get(name), DTensor):  # None for another stage's tensor
            over = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
            divided |= {dimension for dimension, placement in over if not placement.is_replicate()}
    return {dim for dim, dimension in enumerate(mesh.mesh_dim_names or ()) if dimension in divided}


def gathered(
    local_state: Mapping[str, torch.Tensor],
    specs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, HFTensor],
    mesh: DeviceMesh,
    max_bytes: int,
    pool: BufferPool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield complete Hugging Face tensors in the order of `tensors`, the same on every rank.

    Each bucket is a collective, so every rank has to exhaust the iterator. Values are bitwise equal to the shards'.

    Args:
        local_state: The model's own tensors by name: DTensors, or plain tensors if all ranks have them. With `pp`, only
            tensors whose first holder is this rank.
        specs: Tensors on meta that describe the tensors of all ranks.
        tensors: Tensors to yield.
        mesh: Mesh of the DTensors.
        max_bytes: Maximum size of a bucket. A larger tensor gets a separate bucket. A bucket's memory is freed with the
            last tensor in it.
        pool: Allocates the buckets.
    """
    for buffer, bucket in bucket_buffers(tensors, specs, max_bytes, pool):
        # Each rank copies its blocks into zeros; the sum over ranks is the bucket. The sum uses integers, which neither
        # rounds nor loses the sign of zero, because all but one summand are zero.
        buffer.zero_()
        divided = {name: divided_over(tensors[name], local_state, mesh) for name in bucket}
        # This rank has no record of how tensors of other stages are sharded.
        summed_over = range(mesh.ndim) if has_stages(mesh) else sorted(set().union(*divided.values()))
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, full_tensor in bucket.items():
            # If several ranks hold the same values, only the first contributes.
            if all(dim in divided[name] or mesh.get_local_rank(dim) == 0 for dim in summed_over):
                copies += [(block.of(full_tensor), block.tensor) for block in blocks_of(tensors[name], local_state)]
        copy_all(copies)
        with reporting_dead_ranks(GATHER):
            for dim in summed_over:
                dist.all_reduce(buffer.view(torch.int32), group=mesh.get_group(dim))
        yield from bucket.items()
