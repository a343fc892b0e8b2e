"""Tensors without data that record the operations of transformers' conversions as views of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from nrl_models.common.upstream_torch import without_torch_function
from nrl_models.common.views.view import META, Piece, View, offset_through, region_of
from nrl_models.common.views.view_blocks import Block, through
from nrl_models.errors import NRLModelsError


class NotAViewError(NRLModelsError):
    """An operation that is not a view of a parameter was applied to a `TracedTensor`.

    Not a `TypeError`: torch's operators (`tensor * 2`) replace a `TypeError` by a new one.
    """


class TracedTensor(torch.Tensor):
    """A shape without data that records operations as views.

    transformers describes the hub's layout by operations on tensors (`chunk`, `transpose`, ...). Running them on traced
    tensors converts that description to views: torch decomposes each operation into the few in `_RULES`. Operations
    that compute values raise `NotAViewError`.
    """

    pieces: tuple[Piece, ...]
    __torch_function__ = without_torch_function  # type: ignore[assignment]

    @staticmethod
    def of_pieces(shape: Sequence[int], dtype: torch.dtype, pieces: tuple[Piece, ...]) -> TracedTensor:
        """Create a tensor of `shape` that consists of `pieces`."""
        traced = torch.Tensor._make_wrapper_subclass(TracedTensor, torch.Size(shape), dtype=dtype, device=META)
        traced.pieces = pieces
        return traced

    def step(self, method: str, *args: int) -> TracedTensor:
        """Apply one view step, and return the traced result."""
        before, step = tuple(self.shape), (method, args)
        after = region_of(before, (step,)).shape
        if len(self.pieces) == 1 and not self.pieces[0].region:
            pieces = [Piece(self.pieces[0].view.then(method, *args))]
        elif not self.numel():  # `through` drops empty blocks
            pieces = [Piece(piece.view.then("reshape", *after)) for piece in self.pieces]
        else:
            blocks = [self._block(piece) for piece in self.pieces]
            pieces = [_piece(block, after) for old in blocks for block in through([step], before, old)]
        return TracedTensor.of_pieces(after, self.dtype, tuple(pieces))

    def _block(self, piece: Piece) -> Block:
        """Return a piece as a block, whose tensor records further steps of the piece's view."""
        size = region_of(tuple(self.shape), piece.region).shape
        traced = TracedTensor.of_pieces(size, self.dtype, (Piece(piece.view),))
        return Block(offset_through(piece.region, (0,) * self.ndim), traced)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _RULES:
            raise NotAViewError(f"`{name}` is not a view operation")
        return _RULES[name](*args, **(kwargs or {}))

    def __getitem__(self, item: Any) -> Any:
        # torch would move a list of integers to this tensor's device, meta, and lose its values.
        items = item if isinstance(item, tuple) else (item,)
        return super().__getitem__(tuple(torch.tensor(part) if isinstance(part, list) else part for part in items))

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedTensor:
        return self


def _piece(block: Block, shape: Sequence[int]) -> Piece:
    """Return a traced block of a tensor of `shape` as a piece, with a `narrow` for each dimension it does not fill."""
    assert isinstance(block.tensor, TracedTensor)
    sizes = enumerate(zip(block.offset, block.shape, shape, strict=True))
    region = [("narrow", (dim, start, length)) for dim, (start, length, size) in sizes if length != size]
    return Piece(block.tensor.pieces[0].view, tuple(region))


# Implementations of torch operations on traced tensors. Argument names are torch's.


def _same(tensor: TracedTensor, *_: Any, **__: Any) -> TracedTensor:
    return TracedTensor.of_pieces(tensor.shape, tensor.dtype, tensor.pieces)


def _on_meta(tensor: TracedTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=META)


def _dim(tensor: TracedTensor, dim: int) -> int:
    return range(tensor.ndim)[dim]


def _narrow(tensor: TracedTensor, dim: int, start: int, length: int) -> TracedTensor:
    return _same(tensor) if length == tensor.shape[dim] else tensor.step("narrow", dim, start, length)


def _slice(self: TracedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> TracedTensor:
    if step != 1:
        raise NotAViewError(f"a slice with a step of {step} is not a supported view")
    dim = _dim(self, dim)
    start, end, _ = slice(start, end).indices(self.shape[dim])
    return _narrow(self, dim, start, end - start)


def _split(self: TracedTensor, split_size: Any, dim: int = 0) -> list[TracedTensor]:
    dim = _dim(self, dim)
    lengths = [part.shape[dim] for part in _on_meta(self).split(split_size, dim)]
    starts = accumulate(lengths, initial=0)
    return [_narrow(self, dim, start, length) for start, length in zip(starts, lengths, strict=False)]


def _select(self: TracedTensor, dim: int, index: int) -> TracedTensor:
    dim = _dim(self, dim)
    index = range(self.shape[dim])[index]
    if len(self.pieces) != 1 or self.pieces[0].region:
        return self.step("select", dim, index)
    view = self.pieces[0].view
    method, args = view.steps[-1] if view.steps else ("", ())
    if method != "narrow" or args[0] != dim:
        return self.step("select", dim, index)
    selected = View(view.parameter, view.steps[:-1]).then("select", dim, args[1] + index)  # one step instead of two
    shape = (*self.shape[:dim], *self.shape[dim + 1 :])
    return TracedTensor.of_pieces(shape, self.dtype, (Piece(selected),))


def _unbind(self: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(self, dim, index) for index in range(self.shape[dim])]


def _squeeze(self: TracedTensor, dim: int | None = None) -> TracedTensor:
    for axis in reversed(range(self.ndim) if dim is None else [_dim(self, dim)]):
        self = _select(self, axis, 0) if self.shape[axis] == 1 else _same(self)
    return self


def _transpose(self: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    return self.step("transpose", _dim(self, dim0), _dim(self, dim1))


def _reshape(self: TracedTensor, size: Sequence[int], *_: Any) -> TracedTensor:
    wanted = _on_meta(self).view(size).shape  # without -1
    return _same(self) if wanted == self.shape else self.step("reshape", *wanted)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    concatenated = torch.cat([_on_meta(tensor) for tensor in tensors], dim)
    dim = _dim(tensors[0], dim)
    pieces: list[Piece] = []
    start = 0
    for tensor in tensors:
        length = tensor.shape[dim]
        for piece in tensor.pieces:
            pieces.append(Piece(piece.view, (("narrow", (dim, start, length)), *piece.region)))
        start += length
    return TracedTensor.of_pieces(
        concatenated.shape, concatenated.dtype, _merge_neighbors(pieces, dim, concatenated.shape[dim])
    )


def _merge_neighbors(pieces: list[Piece], dim: int, total: int) -> tuple[Piece, ...]:
    """Merge pieces that are contiguous both in the tensor and in the parameter.

    A packed tensor of the hub becomes one view if the model's parameter has its pieces in the same order.
    """
    merged: list[Piece] = []
    for piece in pieces:
        joined = _join(merged[-1], piece, dim) if merged else None
        if joined is None:
            merged.append(piece)
        else:
            merged[-1] = joined
    if len(merged) == 1 and merged[0].region == (("narrow", (dim, 0, total)),):
        return (Piece(merged[0].view),)
    return tuple(merged)


def _join(left: Piece, right: Piece, dim: int) -> Piece | None:
    """Merge two pieces if a single `narrow` can describe both regions and both views; else None."""
    same_place = left.view.parameter == right.view.parameter and left.view.steps[:-1] == right.view.steps[:-1]
    if not (same_place and left.view.steps and len(left.region) == len(right.region) == 1):
        return None
    (left_method, left_args), (right_method, right_args) = left.view.steps[-1], right.view.steps[-1]
    if not (left_method == right_method == "narrow" and left_args[0] == right_args[0] == dim):
        return None
    if left_args[1] + left_args[2] != right_args[1]:
        return None
    (_, (_, start, length)), (_, (_, _, more)) = left.region[0], right.region[0]
    narrow = ("narrow", (dim, left_args[1], left_args[2] + right_args[2]))
    view = View(left.view.parameter, (*left.view.steps[:-1], narrow))
    return Piece(view, (("narrow", (dim, start, length + more)),))


def _zeros(self: TracedTensor, size: Sequence[int] | None = None, **_: Any) -> TracedTensor:
    """Allocate zeros: a tensor without pieces."""
    return TracedTensor.of_pieces(self.shape if size is None else size, self.dtype, ())


def _constant_pad_nd(self: TracedTensor, pad: Sequence[int], value: float = 0) -> TracedTensor:
    if value != 0 or min(pad) < 0:
        raise NotAViewError(f"padding of {list(pad)} with {value} is not a view: expected zeros, and no cropping")
    for dim, before, after in zip(reversed(range(self.ndim)), pad[::2], pad[1::2], strict=False):
        sizes = [(*self.shape[:dim], length, *self.shape[dim + 1 :]) for length in (before, after)]
        self = _cat([_zeros(self, sizes[0]), self, _zeros(self, sizes[1])], dim)
    return self


def _index_select(self: TracedTensor, dim: int, index: torch.Tensor) -> TracedTensor:
    """Pick indices along one dimension; runs of consecutive indices become one `narrow`."""
    dim = _dim(self, dim)
    return _cat([_narrow(self, dim, range(self.shape[dim])[position], 1) for position in index.tolist()], dim)


def _index(self: TracedTensor, indices: Sequence[torch.Tensor | None]) -> TracedTensor:
    chosen = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(chosen) != 1 or chosen[0][1].ndim != 1 or chosen[0][1].dtype != torch.long:
        raise NotAViewError("indexing is a view only along one dimension, by a list of integers")
    return _index_select(self, *chosen[0])


def _permute(self: TracedTensor, dims: Sequence[int]) -> TracedTensor:
    order, wanted = list(range(self.ndim)), [_dim(self, dim) for dim in dims]
    for position, dim in enumerate(wanted):
        if (current := order.index(dim)) != position:
            self = self.step("transpose", position, current)
            order[position], order[current] = order[current], order[position]
    return _same(self)


def _t(self: TracedTensor) -> TracedTensor:
    return _transpose(self, 0, 1) if self.ndim == 2 else _same(self)


def _unsqueeze(self: TracedTensor, dim: int) -> TracedTensor:
    dim = range(self.ndim + 1)[dim]
    return self.step("reshape", *self.shape[:dim], 1, *self.shape[dim:])


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


_RULES: dict[str, Callable[..., Any]] = {
    "_reshape_alias": _reshape,
    "_to_copy": _same,
    "_unsafe_view": _reshape,
    "alias": _same,
    "cat": _cat,
    "clone": _same,
    "constant_pad_nd": _constant_pad_nd,
    "detach": _same,
    "index": _index,
    "index_select": _index_select,
    "narrow": _narrow,
    "new_zeros": _zeros,
    "permute": _permute,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _t,
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "view": _reshape,
    "zeros_like": _zeros,
}
