"""Files of blocks: safetensors in which every rank keeps the regions of tensors that it holds.

A key is a tensor's name and where in it the block begins: `lm_head.weight@0,512`. Whatever the layouts are, a block is
filled from the stored blocks that overlap with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from nrl_models.common.checkpoint.files import DTYPES
from nrl_models.common.projections import own_storage
from nrl_models.common.state_dict.blocks import Block
from nrl_models.common.views.view import HFTensor
from nrl_models.distributed.shards import blocks_of, divided_over
from nrl_models.errors import Problem, ProblemKind

FILE_BYTES = 2 * 2**30
"""A file is not larger, unless a single block is: blocks on a device, or that are not contiguous, are copied to be
written, a file's at a time."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of which this rank holds blocks.

    Args:
        name: what it is called in files.
        tensor: how it lies in tensors of the model's shapes.
        own: these, by the model's names.
    """

    name: str
    tensor: HFTensor
    own: Mapping[str, torch.Tensor]

    @property
    def blocks(self) -> list[Block]:
        """The blocks, over the memory of the own tensors."""
        return blocks_of(self.tensor, self.own)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in an open file.

    Args:
        handle: the file, open and mapped.
        key: its name there.
        offset: where in the tensor it begins, in each dimension.
        shape: its size in each dimension.
    """

    handle: Any
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def copy_into(self, target: Block) -> None:
        """Copy the values of a tensor that lie in both this block and `target`, a block of the same tensor."""
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
class StoredTensor:
    """A tensor of which files hold the blocks.

    Attributes:
        dtype: of all of them.
        blocks: that together are the tensor.
    """

    dtype: torch.dtype
    blocks: list[StoredBlock] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor: as far as blocks reach."""
        ends = [[start + size for start, size in zip(block.offset, block.shape, strict=True)] for block in self.blocks]
        return tuple(map(max, zip(*ends, strict=True)))

    def fill(self, blocks: Iterable[Block]) -> None:
        """Fill blocks of the tensor, of any dtype and on any device, with its values."""
        for block in blocks:
            for stored in self.blocks:
                stored.copy_into(block)


def blocks_to_write(tensors: Iterable[Held], mesh: DeviceMesh) -> Iterator[tuple[str, Block]]:
    """The blocks of tensors that this rank of a mesh writes, with their names.

    These are all that it has; but of ranks that have the same it is one, in turns.
    """
    for number, held in enumerate(tensors):
        divided = divided_over(held.tensor, held.own, mesh)
        if all(dim in divided or number % mesh.size(dim) == mesh.get_local_rank(dim) for dim in range(mesh.ndim)):
            for block in held.blocks:
                yield held.name, block


def write_blocks(folder: Path, prefix: str, blocks: Iterable[tuple[str, Block]]) -> list[str]:
    """Write blocks, each with its tensor's name, as `{prefix}-00000.safetensors` and so on; the names of the files."""
    files: list[str] = []
    batch: dict[str, torch.Tensor] = {}

    def flush() -> None:
        files.append(f"{prefix}-{len(files):05d}.safetensors")
        save_file(batch, folder / files[-1])
        batch.clear()

    for name, block in blocks:
        if batch and sum(tensor.nbytes for tensor in batch.values()) + block.tensor.nbytes > FILE_BYTES:
            flush()
        batch[f"{name}@{','.join(map(str, block.offset))}"] = own_storage(block.tensor)
    if batch:
        flush()
    return files


def stored_tensors(folder: Path, files: Iterable[str], problems: list[Problem]) -> dict[str, StoredTensor]:
    """The tensors whose blocks are in `files` of a folder, which are open from then on.

    Args:
        folder: the folder.
        files: their names.
        problems: to which is added what is wrong: a file that is none of blocks, blocks that are no whole tensor.
    """
    result: dict[str, StoredTensor] = {}
    for file in files:
        try:
            handle = safe_open(folder / file, framework="pt")
            for key in handle.keys():  # noqa: SIM118
                name, _, place = key.rpartition("@")
                part = handle.get_slice(key)
                block = StoredBlock(
                    handle, key, tuple(map(int, place.split(","))) if place else (), tuple(part.get_shape())
                )
                if len(block.offset) != len(block.shape) or min((0, *block.offset)) < 0:
                    raise ValueError(f"{key} is not a tensor's name and a place in it")
                tensor = result.setdefault(name, StoredTensor(DTYPES[part.get_dtype()]))
                if tensor.blocks and len(tensor.blocks[0].shape) != len(block.shape):
                    raise ValueError(f"{key} has {len(block.shape)} dimensions, other blocks of the tensor have not")
                tensor.blocks.append(block)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            problems.append(Problem(ProblemKind.FILE, file, f"is not a file of blocks: {error}"))
    for name, tensor in result.items():
        there, whole = sum(math.prod(block.shape) for block in tensor.blocks), math.prod(tensor.shape)
        if there != whole:
            detail = f"has {there} elements in its blocks, {whole} were expected for its shape {tensor.shape}"
            problems.append(Problem(ProblemKind.PARTIAL, name, detail))
    return result
