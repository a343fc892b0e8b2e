"""Slices of a checkpoint that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.tensor import DTensor

from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.views.view import META, HFTensor, Step, apply_steps, offset_through, strides_of
from nrl_models.common.views.view_blocks import Block, through
from nrl_models.distributed.shards import local_of, own_blocks
from nrl_models.distributed.tensor.packed_shards import over_shard


@dataclass(frozen=True, slots=True, eq=False)
class ShardSlice:
    """A slice of a stored tensor, and the part of a rank's shard that it fills.

    Args:
        stored: The stored tensor.
        region: The `narrow` steps that select a piece of it.
        block: The slice of that piece. Its tensor, on meta, has the offset and strides of the part in the shard.
    """

    stored: StoredTensor
    region: tuple[Step, ...]
    block: Block

    @property
    def nbytes(self) -> int:
        """Its stored size in bytes."""
        return self.block.tensor.numel() * self.stored.dtype.itemsize

    def over(self, shard: torch.Tensor) -> Block:
        """Return the block over the memory of an allocated shard."""
        part = self.block.tensor
        offset = shard.storage_offset() + part.storage_offset()
        return Block(self.block.offset, shard.as_strided(part.shape, part.stride(), int(offset)))

    def read_into(self, block: Block, values: torch.Tensor) -> None:
        """Copy the slice of a stored tensor's `values` into `block`."""
        block.take_from(apply_steps(values, self.region))

    def run(self) -> tuple[int, StoredTensor] | None:
        """Return the offset in the shard, and the slice as a stored tensor; None if either is not contiguous."""
        part = self.block.tensor
        if not part.is_contiguous():
            return None
        shape, offset = tuple(part.shape), offset_through(self.region, self.block.offset)
        partial = [dim for dim, size in enumerate(shape) if size != self.stored.shape[dim]]
        if partial and prod(shape[: partial[-1]]) > 1:
            return None
        skipped = sum(start * stride for start, stride in zip(offset, strides_of(self.stored.shape), strict=True))
        start = self.stored.start + skipped * self.stored.dtype.itemsize
        return int(part.storage_offset()), replace(self.stored, shape=shape, start=start)


def slices_of(
    name: str, parameter: torch.Tensor, sources: Iterable[tuple[StoredTensor, HFTensor]], dtype: torch.dtype
) -> list[ShardSlice]:
    """Return the slices that fill this rank's shard of a parameter.

    Args:
        name: Name of the parameter.
        parameter: The parameter: a DTensor, or a plain tensor if it is not sharded.
        sources: Stored tensors of the parameter.
        dtype: Dtype of the parameter.
    """
    shard = torch.empty(local_of(parameter).shape, dtype=dtype, device=META)
    held_blocks = own_blocks(over_shard(parameter, shard) if isinstance(parameter, DTensor) else shard)
    return [
        ShardSlice(stored, piece.region, block)
        for stored, target in sources
        for piece in target.pieces
        if piece.view.parameter == name
        for held in held_blocks
        for block in through(piece.view.steps, parameter.shape, held)
    ]
