"""Blocks: the region of a Hugging Face tensor that a rank's shard of a parameter is.

A shard is a block of a parameter: an offset and a size in each dimension. A Hugging Face tensor is a
view of the parameter, a list of steps; carrying a block through the steps gives the blocks of the
Hugging Face tensor that the shard holds, each over the shard's own memory. From them a rank knows
which slices of a file to read, what to write into a checkpoint, and where its share of a gathered
tensor goes, without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nrl_models.common.state_dict.views import Step, place_of


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A region of a larger tensor, and the values in it.

    Args:
        offset: where it begins, in each dimension.
        tensor: its values; its shape is the region's.
    """

    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""
        return tuple(self.tensor.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This region of `whole`, a tensor of the larger shape."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole

    def take_from(self, whole: torch.Tensor) -> None:
        """Copy the region's values from `whole`, a tensor of the larger shape."""
        self.tensor.copy_(self.of(whole))

    def put_into(self, whole: torch.Tensor) -> None:
        """Copy the region's values into `whole`, a tensor of the larger shape."""
        self.of(whole).copy_(self.tensor)


def through(steps: Iterable[Step], shape: Sequence[int], block: Block) -> list[Block]:
    """Carry a block of a tensor of `shape` through `steps`: the blocks of the result that lie in it.

    Every returned tensor shares the block's memory. There is no block where the steps leave it, and there are several
    where they divide it.

    Args:
        steps: as of a `View`.
        shape: of the whole tensor.
        block: a region of it.
    """
    blocks = [block]
    place = tuple(shape)
    for method, args in steps:
        if method == "reshape":
            blocks = [new for old in blocks for new in _reshaped(old, place, args)]
        else:
            blocks = [new for old in blocks if (new := _stepped(old, method, args)) is not None]
        place = place_of(place, ((method, args),)).shape
    return [block for block in blocks if block.tensor.numel()]


def _stepped(block: Block, method: str, args: tuple[int, ...]) -> Block | None:
    offset, tensor = list(block.offset), block.tensor
    if method == "narrow":
        dim, start, length = args
        first, last = max(offset[dim], start), min(offset[dim] + tensor.shape[dim], start + length)
        if first >= last:
            return None
        tensor = tensor.narrow(dim, first - offset[dim], last - first)
        offset[dim] = first - start
    elif method == "select":
        dim, index = args
        if not offset[dim] <= index < offset[dim] + tensor.shape[dim]:
            return None
        tensor = tensor.select(dim, index - offset.pop(dim))
    elif method == "transpose":
        first, second = args
        offset[first], offset[second] = offset[second], offset[first]
        tensor = tensor.transpose(first, second)
    else:
        raise ValueError(f"unknown step {method}{args}")
    return Block(tuple(offset), tensor)


def _reshaped(block: Block, old: Sequence[int], new: Sequence[int]) -> list[Block]:
    """`block` of a tensor of shape `old`, as blocks of the same tensor of shape `new`."""
    blocks, dim = [block], 0
    for before, after in _groups(old, new):
        if len(before) != 1:
            blocks = [merged for block in blocks for merged in _merged(block, dim, before)]
        if len(after) != 1:
            blocks = [split for block in blocks for split in _split(block, dim, after)]
        dim += len(after)
    return blocks


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of `old` and of `new` that hold the same elements, as short as possible."""
    result: list[tuple[list[int], list[int]]] = []
    left, right = list(old), list(new)
    while left or right:
        before = [left.pop(0)] if left else []
        after = [right.pop(0)] if right else []
        while torch.Size(before).numel() != torch.Size(after).numel():
            if torch.Size(before).numel() < torch.Size(after).numel():
                before.append(left.pop(0))
            else:
                after.append(right.pop(0))
        result.append((before, after))
    return result


def _merged(block: Block, dim: int, sizes: Sequence[int]) -> list[Block]:
    """Merge dimensions `dim, dim + 1, ...` of `sizes` into one."""
    if not sizes:
        return [Block((*block.offset[:dim], 0, *block.offset[dim:]), block.tensor.unsqueeze(dim))]
    if len(sizes) == 1:
        return [block]
    inner = torch.Size(sizes[1:]).numel()
    rest = slice(dim + 1, dim + len(sizes))
    shape, offset = block.shape, block.offset
    if shape[dim] == 1 or shape[rest] == tuple(sizes[1:]):
        # A contiguous run of the merged dimension, if strides can express it as one dimension.
        first_of_rest = _flat_offset(offset[rest], shape[rest], sizes[1:])
        if first_of_rest is not None:
            merged_shape = (*shape[:dim], torch.Size(shape[dim : rest.stop]).numel(), *shape[rest.stop :])
            start = offset[dim] * inner + first_of_rest
            try:
                view = block.tensor.view(merged_shape)
            except RuntimeError:
                pass
            else:
                return [Block((*offset[:dim], start, *offset[rest.stop :]), view)]
    result = []
    for index in range(shape[dim]):  # one by one along the first of them
        slice_of_block = Block((*offset[:dim], *offset[dim + 1 :]), block.tensor.select(dim, index))
        for merged in _merged(slice_of_block, dim, sizes[1:]):
            start = (offset[dim] + index) * inner + merged.offset[dim]
            result.append(Block((*merged.offset[:dim], start, *merged.offset[dim + 1 :]), merged.tensor))
    return result


def _flat_offset(offset: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Where a region begins in row-major order, if its elements follow one another there; else None."""
    start = 0
    for position, size in zip(offset, sizes, strict=True):
        start = start * size + position
    partial = next((at for at, size in enumerate(shape) if size > 1), len(shape))
    follows = all(shape[at] == sizes[at] for at in range(partial + 1, len(shape)))
    return start if follows else None


def _split(block: Block, dim: int, sizes: Sequence[int]) -> list[Block]:
    """Split dimension `dim` into several, of `sizes`."""
    if not sizes:
        return [Block((*block.offset[:dim], *block.offset[dim + 1 :]), block.tensor.squeeze(dim))]
    if len(sizes) == 1:
        return [block]
    inner = torch.Size(sizes[1:]).numel()
    start, length = block.offset[dim], block.shape[dim]
    result: list[Block] = []
    while length:
        if start % inner == 0 and length >= inner:  # whole rows of the inner dimensions
            count = length // inner * inner
            rows = block.tensor.narrow(dim, start - block.offset[dim], count).unflatten(
                dim, (count // inner, *sizes[1:])
            )
            zeros = (0,) * (len(sizes) - 1)
            result.append(Block((*block.offset[:dim], start // inner, *zeros, *block.offset[dim + 1 :]), rows))
        else:  # within one row
            count = min(length, inner - start % inner)
            row = block.tensor.narrow(dim, start - block.offset[dim], count)
            within = Block((*block.offset[:dim], start % inner, *block.offset[dim + 1 :]), row)
            for inside in _split(within, dim, sizes[1:]):
                offset = (*inside.offset[:dim], start // inner, *inside.offset[dim:])
                result.append(Block(offset, inside.tensor.unsqueeze(dim)))
        start, length = start + count, length - count
    return result
