"""Shards of packed parameters: one dimension has several blocks (gate and up), and a rank has a part of each.

torch's placement for them is `_StridedShard`. `full_tensor()` and `redistribute` support it. But distributed
checkpoints (DCP) and `set_model_state_dict` of torch 2.9 to 2.13 treat such a shard as one contiguous region, and read
or write the wrong rows. `describe_packed_shards` makes them use one region per block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement

from nrl_models.common.upstream_torch import StridedShard, state_dict_utils
from nrl_models.common.views.view_blocks import Block


class Packing(NamedTuple):
    """Layout of a DTensor's local tensor that consists of shards of several blocks.

    Attributes:
        dim: Dimension that has the blocks.
        blocks: Number of blocks in this dimension.
        ranks: Number of ranks that shard each block.
        rank: Index of this rank among them.
    """

    dim: int
    blocks: int
    ranks: int
    rank: int


def packing_of(tensor: DTensor) -> Packing | None:
    """Return how a local tensor consists of shards of blocks; None if it is one contiguous region."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for mesh_dim, placement in enumerate(placements):
        # `fsdp` and `tp` that divide one dimension use `_StridedShard` for a contiguous region.
        if isinstance(placement, StridedShard) and _dims(placements).count(placement.dim) == 1:
            ranks, rank = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            return Packing(placement.dim, int(placement.split_factor), ranks, rank)
    return None


def _dims(placements: Sequence[Placement]) -> list[int]:
    """Return the tensor dimension of each placement that shards one."""
    return [placement.dim for placement in placements if hasattr(placement, "dim")]


def over_shard(dtensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the placements of `dtensor` over another local tensor of the same shape."""
    return DTensor.from_local(
        local, dtensor.device_mesh, dtensor.placements, run_check=False, shape=dtensor.shape, stride=dtensor.stride()
    )


def regions_of(tensor: DTensor) -> list[Block]:
    """Return the contiguous regions of a DTensor that this rank holds."""
    local = tensor.to_local()
    offset = list(_CHUNKS(tensor)[0].offsets) if local.numel() else [0] * tensor.ndim
    packing = packing_of(tensor)
    if packing is None:
        return [Block(tuple(offset), local)]
    dim, blocks, ranks, rank = packing
    block = tensor.shape[dim] // blocks
    share = block // ranks
    regions = []
    for number in range(blocks):
        offset[dim] = number * block + rank * share
        regions.append(Block(tuple(offset), local.narrow(dim, number * share, share)))
    return regions


_CHUNKS: Callable[[DTensor], list[ChunkStorageMetadata]] = DTensor.__create_chunk_list__
"""torch's original function, which is right for DTensors without packed dimensions."""


@functools.cache
def describe_packed_shards() -> None:
    """Make torch's checkpoint functions support packed shards. Other DTensors use torch's code."""
    patched: Any = DTensor
    write_items, shard = patched.__create_write_items__, patched.__get_tensor_shard__
    distribute = state_dict_utils._distribute_tensors

    @functools.wraps(_CHUNKS)
    def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
        if packing_of(self) is None:
            return _CHUNKS(self)
        return [ChunkStorageMetadata(torch.Size(region.offset), region.tensor.size()) for region in regions_of(self)]

    @functools.wraps(write_items)
    def create_write_items(self: DTensor, fqn: str, object: Any) -> list[WriteItem]:
        if packing_of(self) is None:
            items: list[WriteItem] = write_items(self, fqn, object)
            return items
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in create_chunk_list(self)
        ]

    @functools.wraps(shard)
    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        if packing_of(self) is None:
            local: torch.Tensor = shard(self, index)
            return local
        regions = {torch.Size(region.offset): region.tensor for region in regions_of(self)}
        return regions[index.offset] if index.offset is not None else self.to_local()

    @functools.wraps(distribute)
    def distribute_tensors(
        local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None
    ) -> None:
        others = []
        for key in keys:
            value = local_state_dict.get(key)
            pair: Any = value if isinstance(value, (list, tuple)) and len(value) == 2 else (None, None)
            if not isinstance(pair[0], DTensor) or packing_of(pair[0]) is None:
                others.append(key)
                continue
            target, full_tensor = pair
            if target.is_meta:
                target = over_shard(target, torch.empty_like(target.to_local(), device=device))
            with torch.no_grad():
                for region in regions_of(target):
                    region.take_from(full_tensor)
            local_state_dict[key] = target
        distribute(local_state_dict, others, device, pg)

    patched.__create_chunk_list__ = create_chunk_list
    patched.__create_write_items__ = create_write_items
    patched.__get_tensor_shard__ = get_tensor_shard
    state_dict_utils._distribute_tensors = distribute_tensors
