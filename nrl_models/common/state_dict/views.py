"""Views, as data: every Hugging Face tensor is a view of a parameter.

A `View` says where in a parameter a tensor lies, as a short list of steps (`narrow`, `select`,
`transpose`, `reshape`). Loading writes through views, saving and refit read through them, and
tests check that together they cover each parameter exactly once. A view is independent of a model: it
applies to any tensor of the parameter's shape (the weight, its gradient, an optimiser state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from nrl_models.errors import NRLModelsError

META = torch.device("meta")

Step = tuple[str, tuple[int, ...]]
"""One `torch.Tensor` method and its integer arguments, e.g. `("narrow", (0, 0, 256))`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A region of a contiguous tensor: its shape, and the strides and offset that reach it.

    Args:
        shape: the region's shape.
        strides: in elements; None where no strides can express it (rows in another order, say).
        offset: of its first element, in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int = 0

    @property
    def is_block(self) -> bool:
        """Whether the elements follow one another in memory, in their order."""
        packed = place_of(self.shape).strides
        if self.strides is None or packed is None:
            return False
        return all(size == 1 or have == want for size, have, want in zip(self.shape, self.strides, packed, strict=True))


@dataclass(frozen=True, slots=True)
class View:
    """A region of the parameter called `parameter`, reached by applying `steps` in order.

    Args:
        parameter: name in the model's own `state_dict()`.
        steps: `narrow(dim, start, length)`, `select(dim, index)`, `transpose(dim0, dim1)` or
            `reshape(*shape)`, with dimensions counted from the front. Where no strides can express a
            `reshape` (a permutation of rows, as rotary weights need), reading copies; writing does not, but
            then only reshapes may follow.
    """

    parameter: str
    steps: tuple[Step, ...] = ()

    def then(self, method: str, *args: int) -> View:
        """This view with another step."""
        return View(self.parameter, (*self.steps, (method, args)))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region of `tensor`: sharing its storage wherever strides can express the steps."""
        return apply_steps(tensor, self.steps)

    def region_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region of `tensor`, always sharing its storage: of another shape if the last steps would copy.

        Those steps are reshapes, which change neither the elements nor their order.

        Raises:
            ValueError: another step follows one that would copy.
        """
        for number, (method, args) in enumerate(self.steps):
            if method == "reshape" and not is_viewable(tensor, args):
                if any(later != "reshape" for later, _ in self.steps[number:]):
                    raise ValueError(f"{self} cannot be written: after a reshape that copies only reshapes may follow")
                break
            tensor = getattr(tensor, "view" if method == "reshape" else method)(*args)
        return tensor

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy `value` (the shape `of(tensor)` has) into the region, casting to `tensor`'s dtype. No temporary."""
        region = self.region_of(tensor)
        region.copy_(value.reshape(region.shape))

    def place_in(self, shape: Sequence[int]) -> Place:
        """Where the region lies in a contiguous parameter of `shape`."""
        return place_of(tuple(shape), self.steps)

    def __str__(self) -> str:
        return self.parameter + "".join(f".{method}{args}" for method, args in self.steps)


STEPS = ("narrow", "reshape", "select", "transpose")
"""What a step may be."""


@lru_cache(maxsize=2**16)
def place_of(shape: tuple[int, ...], steps: tuple[Step, ...] = ()) -> Place:
    """Where `steps` lead in a contiguous tensor of `shape`: layers have the same steps, and models many layers.

    Raises:
        ValueError: a step of another kind than those of `STEPS`.
    """
    if not steps:
        return Place(shape, torch.empty(shape, device=META).stride())
    *before, step = steps
    place = place_of(shape, tuple(before))
    if step[0] not in STEPS:
        raise ValueError(f"unknown step {step[0]}{step[1]}")
    memory = torch.empty(place.shape, device=META)
    if place.strides is not None:
        memory = torch.empty_strided(place.shape, place.strides, device=META)
    region = apply_steps(memory, [step])
    if place.strides is None or (step[0] == "reshape" and not is_viewable(memory, step[1])):
        return Place(tuple(region.shape), None)
    return Place(tuple(region.shape), region.stride(), place.offset + int(region.storage_offset()))


def apply_steps(tensor: torch.Tensor, steps: Iterable[Step]) -> torch.Tensor:
    """Apply `steps` to `tensor` one after the other."""
    for method, args in steps:
        tensor = getattr(tensor, method)(*args)
    return tensor


def is_viewable(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether strides can express `tensor.reshape(shape)`, so that nothing is copied."""
    try:
        tensor.view(*shape)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Piece:
    """One region of a Hugging Face tensor (`region`, steps into it) and the `view` that holds it."""

    view: View
    region: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A Hugging Face tensor and where the model holds it.

    Nearly always one piece that is the whole tensor. Several when the hub packs separate parameters
    of the model, e.g. a packed `qkv` read by a model that has `q_proj`, `k_proj` and `v_proj`.

    Args:
        name: the tensor's name.
        shape: its shape.
        pieces: where its regions live; what they leave out is padding, which reads as zeros.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that hold it."""
        return tuple(dict.fromkeys(piece.view.parameter for piece in self.pieces))

    @property
    def view(self) -> View | None:
        """The view that is the whole tensor, or None if it is joined from several."""
        return self.pieces[0].view if len(self.pieces) == 1 and not self.pieces[0].region else None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor, from parameters by name: a view where it is one piece, else a new tensor."""
        if self.view is not None:
            return self.view.of(tensors[self.view.parameter])
        first = tensors[self.pieces[0].view.parameter]
        whole = first.new_empty(self.shape)
        parts = [piece.view.of(tensors[piece.view.parameter]) for piece in self.pieces]
        if sum(part.numel() for part in parts) < whole.numel():
            whole.zero_()
        for piece, part in zip(self.pieces, parts, strict=True):
            apply_steps(whole, piece.region).copy_(part)
        return whole

    def write_into(self, parameter: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy what `value` (this Hugging Face tensor) holds of `parameter` into `tensor`, without a temporary."""
        for piece in self.pieces:
            if piece.view.parameter == parameter:
                piece.view.write(tensor, apply_steps(value, piece.region))


class NotAViewError(NRLModelsError):
    """An operation whose result is not a view of a parameter was applied to a `TracedTensor`.

    Not a `TypeError`, which torch's operators (`tensor * 2`) replace by their own.
    """


class TracedTensor(torch.Tensor):
    """A shape without data that records, as views, what is done to it.

    transformers describes the hub's layout by operations on tensors (`chunk`, `transpose`, ...).
    Running them on traced tensors turns that description into views: torch breaks each of them down into the few
    operations of `_RULES`. Operations that compute something raise `NotAViewError`.
    """

    pieces: tuple[Piece, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of_pieces(shape: Sequence[int], dtype: torch.dtype, pieces: tuple[Piece, ...]) -> TracedTensor:
        """A tensor of `shape` that lives in `pieces`."""
        traced = torch.Tensor._make_wrapper_subclass(TracedTensor, torch.Size(shape), dtype=dtype, device=META)
        traced.pieces = pieces
        return traced

    def step(self, method: str, *args: int) -> TracedTensor:
        """The traced result of one view step."""
        if len(self.pieces) != 1 or self.pieces[0].region:
            raise NotAViewError(f"`{method}` on a tensor joined from several parameters is no view of any of them")
        shape = place_of(tuple(self.shape), ((method, args),)).shape
        return TracedTensor.of_pieces(shape, self.dtype, (Piece(self.pieces[0].view.then(method, *args)),))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _RULES:
            raise NotAViewError(f"`{name}` is not a view operation")
        return _RULES[name](*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedTensor:
        return self


# What each of torch's own operations means for a traced tensor. Arguments are named as torch names them.


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
    view = self.pieces[0].view
    method, args = view.steps[-1] if len(self.pieces) == 1 and view.steps else ("", ())
    if method != "narrow" or args[0] != dim:
        return self.step("select", dim, index)
    selected = View(view.parameter, view.steps[:-1]).then("select", dim, args[1] + index)  # a row of some is a row
    shape = (*self.shape[:dim], *self.shape[dim + 1 :])
    return TracedTensor.of_pieces(shape, self.dtype, (Piece(selected),))


def _unbind(self: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(self, dim, index) for index in range(self.shape[dim])]


def _squeeze(self: TracedTensor, dim: int | None = None) -> TracedTensor:
    for place in reversed(range(self.ndim) if dim is None else [_dim(self, dim)]):
        self = _select(self, place, 0) if self.shape[place] == 1 else _same(self)
    return self


def _transpose(self: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    return self.step("transpose", _dim(self, dim0), _dim(self, dim1))


def _reshape(self: TracedTensor, size: Sequence[int], *_: Any) -> TracedTensor:
    wanted = _on_meta(self).view(size).shape  # without -1
    return _same(self) if wanted == self.shape else self.step("reshape", *wanted)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    whole = torch.cat([_on_meta(tensor) for tensor in tensors], dim)
    dim = _dim(tensors[0], dim)
    pieces: list[Piece] = []
    start = 0
    for tensor in tensors:
        length = tensor.shape[dim]
        for piece in tensor.pieces:
            pieces.append(Piece(piece.view, (("narrow", (dim, start, length)), *piece.region)))
        start += length
    return TracedTensor.of_pieces(whole.shape, whole.dtype, _merge_neighbours(pieces, dim, whole.shape[dim]))


def _merge_neighbours(pieces: list[Piece], dim: int, total: int) -> tuple[Piece, ...]:
    """Join pieces that are neighbours both in the tensor and in the parameter.

    So a tensor that the hub packs is one view where the model's parameter has its pieces in the same order.
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
    """One piece in place of two, where a single `narrow` can say both on each side."""
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


_RULES: dict[str, Callable[..., Any]] = {
    "_reshape_alias": _reshape,
    "_to_copy": _same,
    "alias": _same,
    "cat": _cat,
    "clone": _same,
    "detach": _same,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "unbind": _unbind,
    "view": _reshape,
}
