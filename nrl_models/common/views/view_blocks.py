"""Blocks: axis-aligned regions of a larger tensor, which steps of a view cut and move.

A rank's shard is a block of a parameter: an offset and a size in each dimension. A Hugging Face tensor is a view of the
parameter, given as a list of steps. Applying the steps to a block gives the blocks of the Hugging Face tensor in the
shard, which share the shard's memory. From them, each rank finds without communication:

- which slices of a file to read,
- what to write into a checkpoint,
- where its part of a gathered tensor belongs.

A `TracedTensor` that consists of several parameters has a block for each. Their tensors are traced, and record steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from nrl_models.common.views.view import Step, is_viewable, region_of


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A region of a larger tensor, with its values.

    Args:
        offset: Offset of the region, per dimension.
        tensor: Values of the region. Its shape is the region's size.
    """

    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Size in each dimension."""
        return tuple(self.tensor.shape)

    def of(self, full_tensor: torch.Tensor) -> torch.Tensor:
        """Return this region of `full_tensor`, a tensor of the larger shape."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            full_tensor = full_tensor.narrow(dim, start, length)
        return full_tensor

    def take_from(self, full_tensor: torch.Tensor) -> None:
        """Copy the region's values from `full_tensor`, a tensor of the larger shape."""
        self.tensor.copy_(self.of(full_tensor))


def through(steps: Iterable[Step], shape: Sequence[int], block: Block) -> list[Block]:
    """Apply `steps` to a block of a tensor of `shape`, and return the resulting blocks.

    All returned tensors share the block's memory. The result is empty if the steps select nothing of the block, and has
    several blocks if they split it.

    Args:
        steps: Steps of a `View`.
        shape: Shape of the complete tensor.
        block: A region of the tensor.
    """
    blocks = [block]
    after = tuple(shape)
    for method, args in steps:
        before, after = after, region_of(after, ((method, args),)).shape
        if method == "reshape":
            blocks = [new for old in blocks for new in _reshaped(old, before, args)]
        else:
            blocks = [new for old in blocks if (new := _stepped(old, method, args)) is not None]
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
    else:  # transpose
        first, second = args
        offset[first], offset[second] = offset[second], offset[first]
        tensor = tensor.transpose(first, second)
    return Block(tuple(offset), tensor)


def _reshaped(block: Block, old: Sequence[int], new: Sequence[int]) -> list[Block]:
    """Return the blocks that `block`, a region of a tensor of shape `old`, becomes if the tensor has shape `new`."""
    blocks, dim = [block], 0
    for before, after in dimension_runs(old, new):
        if not before:
            blocks = [Block((*each.offset[:dim], 0, *each.offset[dim:]), each.tensor.unsqueeze(dim)) for each in blocks]
        for position in reversed(range(1, len(before))):
            inner = prod(before[position:])
            blocks = [merged for each in blocks for merged in _merged(each, dim + position - 1, inner)]
        for position in range(1, len(after)):
            inner = prod(after[position:])
            blocks = [split for each in blocks for split in _split(each, dim + position - 1, inner)]
        if not after:
            blocks = [Block((*each.offset[:dim], *each.offset[dim + 1 :]), each.tensor.squeeze(dim)) for each in blocks]
        dim += len(after)
    return blocks


def _merged(block: Block, dim: int, inner: int) -> list[Block]:
    """Merge dimension `dim` and the next one, which has size `inner` in the complete tensor."""
    offset, shape = block.offset, block.shape
    rows, length = shape[dim : dim + 2]
    merged = (*shape[:dim], rows * length, *shape[dim + 2 :])
    if length == inner and is_viewable(block.tensor, merged):
        return [Block((*offset[:dim], offset[dim] * inner, *offset[dim + 2 :]), block.tensor.view(merged))]
    return [
        Block(
            (*offset[:dim], (offset[dim] + row) * inner + offset[dim + 1], *offset[dim + 2 :]),
            block.tensor.select(dim, row),
        )
        for row in range(rows)
    ]


def _split(block: Block, dim: int, inner: int) -> list[Block]:
    """Split dimension `dim` into two. The second one has size `inner` in the complete tensor."""
    start, length = block.offset[dim], block.shape[dim]
    result = []
    done = 0
    while done < length:
        row, first = divmod(start + done, inner)
        left = length - done
        count = left // inner * inner if first == 0 and left >= inner else min(inner - first, left)
        size = min(count, inner)
        shape = (*block.shape[:dim], count // size, size, *block.shape[dim + 1 :])
        part = block.tensor.narrow(dim, done, count).view(shape)
        result.append(Block((*block.offset[:dim], row, first, *block.offset[dim + 1 :]), part))
        done += count
    return result


def dimension_runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Match runs of dimensions of `old` with runs of `new` of the same size. The runs are as short as possible."""
    if prod(old) == 0:  # empty, so products of sizes cannot be compared
        return [(list(old), list(new))]
    result: list[tuple[list[int], list[int]]] = []
    left, right = list(old), list(new)
    while left or right:
        before = [left.pop(0)] if left else []
        after = [right.pop(0)] if right else []
        while prod(before) != prod(after):
            if prod(before) < prod(after):
                before.append(left.pop(0))
            else:
                after.append(right.pop(0))
        result.append((before, after))
    return result
