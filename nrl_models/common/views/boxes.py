"""Boxes: axis-aligned regions of a tensor assembled from several parameters, to which steps can be applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from nrl_models.common.views.view import Piece, Step, View
from nrl_models.errors import NRLModelsError


class NotAViewError(NRLModelsError):
    """An operation that is not a view of a parameter was applied to a `TracedTensor`.

    Not a `TypeError`: torch's operators (`tensor * 2`) replace a `TypeError` by a new one.
    """


@dataclass(frozen=True, slots=True)
class Box:
    """A region of an assembled tensor, and the view of a parameter that fills it.

    Args:
        view: View of shape `shape`.
        offset: Offset of the region, per dimension of the assembled tensor.
        shape: Size of the region, per dimension.
    """

    view: View
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def narrowed(self, dim: int, start: int, length: int) -> Box | None:
        """Return the part of the box within `[start, start + length)` of `dim`, with offsets relative to `start`."""
        begin, end = self.offset[dim], self.offset[dim] + self.shape[dim]
        first, last = max(begin, start), min(end, start + length)
        if first >= last:
            return None
        is_all = last - first == self.shape[dim]
        view = self.view if is_all else self.view.then("narrow", dim, first - begin, last - first)
        return Box(view, _replaced(self.offset, dim, first - start), _replaced(self.shape, dim, last - first))

    def selected(self, dim: int, index: int) -> Box | None:
        """Return the part of the box at `index` of `dim`, without that dimension; None if it is not in the box."""
        begin = self.offset[dim]
        if not begin <= index < begin + self.shape[dim]:
            return None
        view = self.view.then("select", dim, index - begin)
        return Box(view, _without(self.offset, dim), _without(self.shape, dim))

    def transposed(self, dim0: int, dim1: int) -> Box:
        """Return the box with two dimensions exchanged."""
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        offset, shape = (tuple(sizes[dim] for dim in order) for sizes in (self.offset, self.shape))
        return Box(self.view.then("transpose", dim0, dim1), offset, shape)


def boxes_of(shape: Sequence[int], pieces: Sequence[Piece]) -> list[Box]:
    """Return the boxes of an assembled tensor of `shape`. Regions of pieces consist of `narrow` steps."""
    boxes = []
    for piece in pieces:
        offset, size = [0] * len(shape), list(shape)
        for method, (dim, start, length) in piece.region:
            if method != "narrow":
                raise ValueError(f"{method} in a region: expected narrow")
            offset[dim] += start
            size[dim] = length
        boxes.append(Box(piece.view, tuple(offset), tuple(size)))
    return boxes


def pieces_of(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Piece, ...]:
    """Return the pieces of an assembled tensor of `shape`, with a `narrow` for each dimension a box does not fill."""

    def region(box: Box) -> Iterator[Step]:
        for dim, (start, length, whole) in enumerate(zip(box.offset, box.shape, shape, strict=True)):
            if length != whole:
                yield "narrow", (dim, start, length)

    return tuple(Piece(box.view, tuple(region(box))) for box in boxes)


def step_boxes(boxes: Sequence[Box], shape: Sequence[int], method: str, args: tuple[int, ...]) -> list[Box]:
    """Apply one step to an assembled tensor of `shape`."""
    if method == "narrow":
        return [new for box in boxes if (new := box.narrowed(*args)) is not None]
    if method == "select":
        return [new for box in boxes if (new := box.selected(*args)) is not None]
    if method == "transpose":
        return [box.transposed(*args) for box in boxes]
    return [new for box in boxes for new in _reshaped(box, tuple(shape), args)]


def _reshaped(box: Box, old: tuple[int, ...], new: tuple[int, ...]) -> list[Box]:
    """Return the box in a tensor reshaped from `old` to `new`; several boxes if its rows are no longer adjacent."""
    boxes, done = [box], 0
    for before, after in dimension_runs(old, new):
        dims = range(done, done + len(before))
        boxes = [each for one in boxes for each in _run_reshaped(one, dims, before, after)]
        done += len(after)
    return boxes


def _run_reshaped(box: Box, dims: range, before: Sequence[int], after: Sequence[int]) -> list[Box]:
    """Replace the dimensions `dims` of a box, with full sizes `before`, by dimensions with full sizes `after`."""
    first = dims.start
    sizes = box.shape[first : dims.stop]
    if list(before) == list(after):
        return [box]
    if list(sizes) == list(before) or prod(before) == 0:
        return [_with_dims(box, dims, [0] * len(after), after)]
    boxes = _merged(box, dims, before)
    for place in range(first, first + len(after) - 1):
        inner = prod(after[place - first + 1 :])
        boxes = [each for one in boxes for each in _split(one, place, inner)]
    return boxes


def _merged(box: Box, dims: range, before: Sequence[int]) -> list[Box]:
    """Merge the dimensions `dims` of a box, with full sizes `before`, to one."""
    first, sizes = dims.start, box.shape[dims.start : dims.stop]
    # Dimensions after the last partial one are filled. Dimensions before it are split into separate boxes.
    partial = max(dim for dim, size in enumerate(sizes) if size != before[dim])
    inner = prod(before[partial + 1 :])
    length = sizes[partial] * inner
    shape = (*box.shape[:first], length, *box.shape[dims.stop :])
    result = []
    for outer in product(*map(range, sizes[:partial])):
        view, start = box.view, 0
        for dim, index in enumerate(outer):
            view = view.then("select", first, index)
            start = (start + box.offset[first + dim] + index) * before[dim + 1]
        start = (start + box.offset[first + partial]) * inner
        offset = (*box.offset[:first], start, *box.offset[dims.stop :])
        result.append(Box(view.then("reshape", *shape), offset, shape))
    return result


def _split(box: Box, dim: int, inner: int) -> Iterator[Box]:
    """Split dimension `dim` of a box into two. The second one has the full size `inner`."""
    start, end = box.offset[dim], box.offset[dim] + box.shape[dim]
    while start < end:
        row, first = divmod(start, inner)
        rows = (end - start) // inner if first == 0 else 0
        length = rows * inner or min(inner - first, end - start)
        part = box.narrowed(dim, start, length)
        assert part is not None  # it lies in the box
        yield _with_dims(part, range(dim, dim + 1), (row, first), (rows or 1, length // (rows or 1)))
        start += length


def _with_dims(box: Box, dims: range, offset: Sequence[int], sizes: Sequence[int]) -> Box:
    """Replace the dimensions `dims` of a box by dimensions with `offset` and `sizes`, of as many elements."""
    shape = (*box.shape[: dims.start], *sizes, *box.shape[dims.stop :])
    offset = (*box.offset[: dims.start], *offset, *box.offset[dims.stop :])
    return Box(box.view.then("reshape", *shape), offset, shape)


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


def _replaced(sizes: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*sizes[:dim], value, *sizes[dim + 1 :])


def _without(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])
