"""Views as data: every Hugging Face tensor is a view of a parameter.

A `View` locates a tensor in a parameter by a short list of steps (`narrow`, `select`, `transpose`, `reshape`). Loading
writes through views; saving and refits read through them. Tests check that the views of a parameter cover each element
exactly once. A view is independent of the model: it applies to any tensor of the parameter's shape (the weight, its
gradient, an optimizer state).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

META = torch.device("meta")

Step = tuple[str, tuple[int, ...]]
"""One `torch.Tensor` method and its integer arguments, e.g. `("narrow", (0, 0, 256))`."""


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a contiguous tensor.

    Args:
        shape: Shape of the region.
        strides: Strides in elements; None if no strides can express it (for example, rows in another order).
        offset: Offset of its first element, in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int = 0

    @property
    def is_block(self) -> bool:
        """Whether the elements are consecutive in memory, in order."""
        if self.strides is None:
            return False
        sizes = zip(self.shape, self.strides, strides_of(self.shape), strict=True)
        return all(size == 1 or have == want for size, have, want in sizes)


@dataclass(frozen=True, slots=True)
class View:
    """A region of a parameter, defined by a list of steps.

    Args:
        parameter: Name in the model's own `state_dict()`.
        steps: `narrow(dim, start, length)`, `select(dim, index)`, `transpose(dim0, dim1)` or `reshape(*shape)`, with
            non-negative dimensions. If no strides can express a `reshape` (a permutation of rows, as for rotary
            weights), reading copies. Writing does not copy, but then only reshapes may follow.
    """

    parameter: str
    steps: tuple[Step, ...] = ()

    def then(self, method: str, *args: int) -> View:
        """Return this view with another step. A reshape replaces a reshape before it."""
        is_replaced = method == "reshape" and self.steps and self.steps[-1][0] == "reshape"
        return View(self.parameter, (*(self.steps[:-1] if is_replaced else self.steps), (method, args)))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of `tensor`. It shares storage with `tensor` if strides can express the steps."""
        return apply_steps(tensor, self.steps)

    def region_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of `tensor`, always sharing its storage. The shape differs if the last steps would copy.

        Such steps are reshapes, which change neither the elements nor their order.

        Raises:
            ValueError: If a step other than a reshape follows one that would copy.
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

    def region_in(self, shape: Sequence[int]) -> Region:
        """Return the region of this view in a contiguous parameter of `shape`."""
        return region_of(tuple(shape), self.steps)

    def __str__(self) -> str:
        return self.parameter + "".join(f".{method}{args}" for method, args in self.steps)


STEPS = ("narrow", "reshape", "select", "transpose")
"""Tensor methods that a view may consist of."""


@lru_cache(maxsize=2**16)
def region_of(shape: tuple[int, ...], steps: tuple[Step, ...] = ()) -> Region:
    """Return the region that `steps` select in a contiguous tensor of `shape`. Cached, because layers repeat steps.

    Raises:
        ValueError: If a step is not in `STEPS`.
    """
    if not steps:
        return Region(shape, strides_of(shape))
    *before, step = steps
    parent_region = region_of(shape, tuple(before))
    if step[0] not in STEPS:
        raise ValueError(f"unknown step {step[0]}{step[1]}")
    memory = torch.empty(parent_region.shape, device=META)
    if parent_region.strides is not None:
        memory = torch.empty_strided(parent_region.shape, parent_region.strides, device=META)
    region = apply_steps(memory, [step])
    if parent_region.strides is None or (step[0] == "reshape" and not is_viewable(memory, step[1])):
        return Region(tuple(region.shape), None)
    return Region(tuple(region.shape), region.stride(), parent_region.offset + int(region.storage_offset()))


@lru_cache(maxsize=2**16)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of `shape`."""
    return torch.empty(shape, device=META).stride()


def apply_steps(tensor: torch.Tensor, steps: Iterable[Step]) -> torch.Tensor:
    """Apply `steps` to `tensor` one after the other."""
    for method, args in steps:
        tensor = getattr(tensor, method)(*args)
    return tensor


def is_viewable(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return True if strides can express `tensor.reshape(shape)`, so that nothing is copied."""
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


def offset_through(region: Iterable[Step], offset: Sequence[int]) -> tuple[int, ...]:
    """Return an offset inside a piece as an offset in the tensor that the piece is a region of.

    Raises:
        ValueError: If a step of the region is not `narrow`.
    """
    result = list(offset)
    for method, args in region:
        if method != "narrow":
            raise ValueError(f"{method} in a region: expected narrow")
        result[args[0]] += args[1]
    return tuple(result)


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A Hugging Face tensor, and its location in the model.

    Usually a single piece that is the complete tensor. There are several pieces if the hub packs separate parameters of
    the model, for example a packed `qkv` for a model with `q_proj`, `k_proj` and `v_proj`.

    Args:
        name: Name of the tensor.
        shape: Shape of the tensor.
        pieces: Views of parameters for its regions. The rest is padding, which reads as zeros.
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
        """The view that is the complete tensor, or None if there are several pieces."""
        return self.pieces[0].view if len(self.pieces) == 1 and not self.pieces[0].region else None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Read the tensor from parameters by name: a view for a single piece, else a new tensor."""
        if self.view is not None:
            return self.view.of(tensors[self.view.parameter])
        output = tensors[self.pieces[0].view.parameter].new_empty(self.shape)
        for target, source in self.copies(output, tensors):
            target.copy_(source)
        return output

    def copies(
        self, output: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies that write this tensor into `output`: pairs of target and source, without temporary tensors.

        Args:
            output: A contiguous tensor of `shape`. Padding is set to zero.
            tensors: Parameters by name.
        """
        sources = [piece.view.region_of(tensors[piece.view.parameter]) for piece in self.pieces]
        if self.view is None and sum(source.numel() for source in sources) < output.numel():
            output.zero_()
        result = []
        for piece, source in zip(self.pieces, sources, strict=True):
            target = apply_steps(output, piece.region) if piece.region else output
            if target.shape != source.shape:
                if is_viewable(target, source.shape):
                    target = target.view(source.shape)
                else:
                    source = source.reshape(target.shape)
            result.append((target, source))
        return result

    def write_into(self, parameter: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy the part of `value` (this Hugging Face tensor) that belongs to `parameter` into `tensor`."""
        for piece in self.pieces:
            if piece.view.parameter == parameter:
                piece.view.write(tensor, apply_steps(value, piece.region))
