"""Files of blocks: safetensors files in which each rank stores its regions of the tensors.

A key consists of the tensor's name and the block's offset in it: `lm_head.weight@0,512`. Loading copies the overlap of
stored and requested blocks, so it works between any two layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.device_mesh import DeviceMesh

from nrl_models.common.checkpoint.stored_tensors import DTYPES
from nrl_models.common.checkpoint.tensor_files import write_tensors
from nrl_models.common.views.view import HFTensor
from nrl_models.common.views.view_blocks import Block
from nrl_models.distributed.resume_checkpoints.manifest import WrittenFile
from nrl_models.distributed.shards import blocks_of, divided_over
from nrl_models.errors import Problem, ProblemKind

FILE_BYTES = 2 * 2**30
"""Maximum size of a file, unless a single block is larger."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of which this rank holds blocks.

    Args:
        name: Name of the tensor in files.
        tensor: Views of the model's tensors that form this tensor.
        model_tensors: The model's tensors by name.
    """

    name: str
    tensor: HFTensor
    model_tensors: Mapping[str, torch.Tensor]

    @property
    def blocks(self) -> list[Block]:
        """The blocks, over the memory of the model's tensors."""
        return blocks_of(self.tensor, self.model_tensors)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in an open file.

    Args:
        handle: The open, memory-mapped file.
        key: Key of the block in the file.
        offset: Offset of the block in the tensor, per dimension.
        shape: Size of the block, per dimension.
    """

    handle: Any
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def copy_into(self, target: Block) -> None:
        """Copy the overlap of this block and `target`, a block of the same tensor, into `target`."""
        first = [max(pair) for pair in zip(self.offset, target.offset, strict=True)]
        ends = zip(self.offset, self.shape, target.offset, target.shape, strict=True)
        last = [min(mine + length, theirs + wanted) for mine, length, theirs, wanted in ends]
        if any(begin >= end for begin, end in zip(first, last, strict=True)):
            return
        if not first:
            target.tensor.copy_(self.handle.get_tensor(self.key))
            return
        here, there = (
            tuple(slice(begin - start, end - start) for begin, end, start in zip(first, last, offset, strict=True))
            for offset in (self.offset, target.offset)
        )
        target.tensor[there].copy_(self.handle.get_slice(self.key)[here])


@dataclass(slots=True)
class BlockedTensor:
    """A tensor whose blocks are in files.

    Attributes:
        dtype: Dtype of the blocks.
        blocks: Blocks that together form the tensor.
    """

    dtype: torch.dtype
    blocks: list[StoredBlock] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, up to the end of its last blocks."""
        ends = [[start + size for start, size in zip(block.offset, block.shape, strict=True)] for block in self.blocks]
        return tuple(map(max, zip(*ends, strict=True)))

    def fill(self, blocks: Iterable[Block]) -> None:
        """Fill blocks of the tensor, of any dtype and on any device, with its values."""
        for block in blocks:
            for stored in self.blocks:
                stored.copy_into(block)


def blocks_to_write(tensors: Iterable[HeldTensor], mesh: DeviceMesh) -> Iterator[tuple[str, Block]]:
    """Yield the blocks of tensors that this rank of a mesh writes, with the names of the tensors.

    If several ranks hold the same blocks, one of them writes. Such ranks take turns, one tensor each.
    """
    for number, held in enumerate(tensors):
        divided = divided_over(held.tensor, held.model_tensors, mesh)
        if all(dim in divided or number % mesh.size(dim) == mesh.get_local_rank(dim) for dim in range(mesh.ndim)):
            for block in held.blocks:
                yield held.name, block


def copied(blocks: Iterable[tuple[str, Block]]) -> list[tuple[str, Block]]:
    """Copy blocks into host memory, which is pinned for blocks on CUDA devices. Later updates do not change the copies.

    Returns after all copies are complete.
    """
    copies = []
    devices = set()
    for name, block in blocks:
        values = block.tensor.detach()
        is_cuda = values.device.type == "cuda"
        copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=is_cuda)
        copies.append((name, Block(block.offset, copy.copy_(values, non_blocking=is_cuda))))
        devices |= {values.device} if is_cuda else set()
    for device in devices:
        torch.cuda.synchronize(device)
    return copies


def write_blocks(folder: Path, prefix: str, blocks: Iterable[tuple[str, Block]]) -> dict[str, WrittenFile]:
    """Write blocks, each with its tensor's name, as `{prefix}-00000.safetensors` and so on, and sync them to disk.

    Returns:
        Size and hash of each file, by name.
    """
    files: dict[str, WrittenFile] = {}
    batch: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        name = f"{prefix}-{len(files):05d}.safetensors"
        files[name] = WrittenFile(*write_tensors(folder / name, batch))
        batch.clear()

    for name, block in blocks:
        if batch and size + block.tensor.nbytes > FILE_BYTES:
            flush()
            size = 0
        batch[f"{name}@{','.join(map(str, block.offset))}"] = block.tensor
        size += block.tensor.nbytes
    if batch:
        flush()
    return files


def stored_tensors(folder: Path, files: Iterable[str], problems: list[Problem]) -> dict[str, BlockedTensor]:
    """Open the files of a folder, and return the tensors whose blocks they have.

    Args:
        folder: Directory of the files.
        files: File names.
        problems: Receives a problem for each file without valid blocks, and each tensor with missing blocks.
    """
    result: dict[str, BlockedTensor] = {}
    for file in files:
        try:
            handle = safe_open(folder / file, framework="pt")
            for key in handle.keys():  # noqa: SIM118
                name, _, offset = key.rpartition("@")
                part = handle.get_slice(key)
                block = StoredBlock(
                    handle, key, tuple(map(int, offset.split(","))) if offset else (), tuple(part.get_shape())
                )
                if len(block.offset) != len(block.shape) or min((0, *block.offset)) < 0:
                    raise ValueError(f"{key} is not a tensor's name and a place in it")
                tensor = result.setdefault(name, BlockedTensor(DTYPES[part.get_dtype()]))
                if tensor.blocks and len(tensor.blocks[0].shape) != len(block.shape):
                    raise ValueError(f"{key} has {len(block.shape)} dimensions, other blocks of the tensor have not")
                tensor.blocks.append(block)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            problems.append(Problem(ProblemKind.FILE, file, f"is not a file of blocks: {error}"))
    for name, tensor in result.items():
        actual, expected = sum(math.prod(block.shape) for block in tensor.blocks), math.prod(tensor.shape)
        if actual != expected:
            detail = f"has {actual} elements in its blocks, {expected} were expected for its shape {tensor.shape}"
            problems.append(Problem(ProblemKind.PARTIAL, name, detail))
    return result
