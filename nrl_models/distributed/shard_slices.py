"""Slices of a checkpoint that a rank holds, and memory maps of those that are contiguous in a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.tensor import DTensor

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.projections import Buffer
from nrl_models.common.state_dict.blocks import Block, through
from nrl_models.common.views.view import META, HFTensor, Step, apply_steps, offset_through, strides_of
from nrl_models.distributed.shards import local_of, over_shard, own_blocks


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
    name: str, whole: torch.Tensor, sources: Iterable[tuple[StoredTensor, HFTensor]], dtype: torch.dtype
) -> list[ShardSlice]:
    """Return the slices that fill this rank's shard of a parameter.

    Args:
        name: Name of the parameter.
        whole: The parameter: a DTensor, or a plain tensor if it is not sharded.
        sources: Stored tensors of the parameter.
        dtype: Dtype of the parameter.
    """
    shard = torch.empty(local_of(whole).shape, dtype=dtype, device=META)
    held_blocks = own_blocks(over_shard(whole, shard) if isinstance(whole, DTensor) else shard)
    return [
        ShardSlice(stored, piece.region, block)
        for stored, target in sources
        for piece in target.pieces
        if piece.view.parameter == name
        for held in held_blocks
        for block in through(piece.view.steps, whole.shape, held)
    ]


def map_shards(
    shards: Sequence[Sequence[ShardSlice]], shapes: Sequence[torch.Size], files: CheckpointFiles, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a memory-mapped view of consecutive shards; None if they are not contiguous in the files.

    Args:
        shards: Slices of each shard.
        shapes: Shape of each shard. They differ only in the first dimension.
        files: The checkpoint.
        dtype: Dtype of all shards.
    """
    if not files.is_private or any(part.stored.dtype != dtype for slices in shards for part in slices):
        return None
    runs: list[StoredTensor] = []
    for slices, shape in zip(shards, shapes, strict=True):
        found = [run for part in slices if (run := part.run()) is not None]
        found.sort(key=lambda run: run[0])
        filled = 0
        for offset, stored in found:
            if offset != filled:
                return None
            filled += stored.numel
        if len(found) < len(slices) or filled != shape.numel():
            return None
        runs += [stored for _, stored in found]
    return files.read_joined(runs, Buffer.shape_of(shapes))
