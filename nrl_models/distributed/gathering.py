"""Gathering whole tensors from shards, one bucket at a time: for engines, and for plain checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nrl_models.common.state_dict.views import HFTensor
from nrl_models.distributed.mesh import reporting_dead_ranks
from nrl_models.distributed.shards import blocks_of, divided_over

DEFAULT_BUCKET = 512 * 2**20
"""Bytes gathered at a time where nothing else is said."""

_ALIGNMENT = 16
"""Where tensors of any dtype may begin in a bucket."""


def gathered(
    own: Mapping[str, torch.Tensor], tensors: Mapping[str, HFTensor], mesh: DeviceMesh, max_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole Hugging Face tensors, in the order of `tensors`, the same on every rank.

    Every rank has to go through all of it: each bucket is a collective. Values are bit for bit those of the shards.

    Args:
        own: the model's own tensors, by name: DTensors, or plain where every rank has them.
        tensors: what to yield.
        mesh: over which the DTensors are sharded.
        max_bytes: the size of a bucket, which lives as long as a tensor in it. One tensor that is larger gets a
            bucket of its own.
    """
    bucket: dict[str, HFTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = _nbytes(tensor, own)
        if bucket and size + nbytes > max_bytes:
            yield from _gather(own, bucket, mesh)
            bucket, size = {}, 0
        bucket[name] = tensor
        size += nbytes
    yield from _gather(own, bucket, mesh)


def _nbytes(tensor: HFTensor, own: Mapping[str, torch.Tensor]) -> int:
    """Bytes it takes in a bucket."""
    nbytes = torch.Size(tensor.shape).numel() * own[tensor.parameters[0]].dtype.itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _gather(
    own: Mapping[str, torch.Tensor], tensors: Mapping[str, HFTensor], mesh: DeviceMesh
) -> Iterator[tuple[str, torch.Tensor]]:
    """One bucket: every rank puts its blocks into zeros, and the sum of all is the bucket.

    Summed as integers, to which nothing but zeros is added: no rounding, and no sign of zero is lost.
    """
    if not tensors:
        return
    divided = {name: divided_over(tensor, own) for name, tensor in tensors.items()}
    summed_over = sorted(set().union(*divided.values()))
    device = own[next(iter(tensors.values())).parameters[0]].device
    buffer = torch.zeros(sum(_nbytes(tensor, own) for tensor in tensors.values()), dtype=torch.uint8, device=device)
    result: dict[str, torch.Tensor] = {}
    start = 0
    for name, tensor in tensors.items():
        dtype = own[tensor.parameters[0]].dtype
        length = torch.Size(tensor.shape).numel() * dtype.itemsize
        whole = result[name] = buffer[start : start + length].view(dtype).view(tensor.shape)
        start += _nbytes(tensor, own)
        # Of ranks that hold the same values only the first contributes.
        if all(dim in divided[name] or mesh.get_local_rank(dim) == 0 for dim in summed_over):
            for block in blocks_of(tensor, own):
                block.put_into(whole)
    with reporting_dead_ranks("gather the model's tensors"):
        for dim in summed_over:
            dist.all_reduce(buffer.view(torch.int32), group=mesh.get_group(dim))
    yield from result.items()
