"""Contiguous tensors in one buffer, each with a separate storage.

Libraries detect tied weights by their storage (accelerate, safetensors, transformers). Slices of a single storage would
look tied, and all but one would be dropped on saving. So each tensor gets a separate storage over its rows of the
buffer. Each storage holds a reference to the buffer, which keeps it alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from nrl_models.common.upstream_torch import storage_use_count

_DLPACK_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""Dtypes that pass through DLPack; others pass as bytes."""

_PLAIN = frozenset({nn.Parameter, torch.Tensor})
"""Classes of tensors in a buffer. Subclasses may have their memory elsewhere."""


class Buffer:
    """A buffer with several contiguous tensors.

    Args:
        rows: The complete buffer: the tensors, concatenated in their first dimension.
        lengths: Number of rows of each tensor.
    """

    __slots__ = ("__weakref__", "_places", "lengths", "rows")

    def __init__(self, rows: torch.Tensor, lengths: Sequence[int]) -> None:
        self.rows = rows
        self.lengths = tuple(lengths)
        self._places = [(part.data_ptr(), part.shape, part.dtype) for part in rows.split(self.lengths)]

    @staticmethod
    def shape_of(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the shape of the buffer of tensors of `shapes`, which differ only in the first dimension."""
        if len(shapes) == 1:
            return tuple(shapes[0])
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def neighbors(self) -> list[torch.Tensor]:
        """Return the tensors in the buffer, each with a separate storage that keeps the buffer alive."""
        result = []
        for rows in self.rows.split(self.lengths):
            neighbor = own_storage(rows)
            storage: Any = neighbor.untyped_storage()
            storage.nrl_buffer = self
            result.append(neighbor)
        return result

    @staticmethod
    def of(tensors: Sequence[Any]) -> Buffer | None:
        """Return the buffer whose rows are exactly `tensors`, in this order; None if there is none, or one is None.

        The objects may be new: under tensor parallelism, a plain tensor over this rank's memory replaces a parameter.
        """
        first = tensors[0]
        buffer = getattr(first.untyped_storage(), "nrl_buffer", None) if type(first) in _PLAIN else None
        if buffer is None or len(tensors) != len(buffer.lengths):
            return None
        for tensor, (address, shape, dtype) in zip(tensors, buffer._places, strict=True):
            if (
                type(tensor) not in _PLAIN
                or tensor.data_ptr() != address
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or not tensor.is_contiguous()
            ):
                return None
        return buffer


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory with a separate storage. Copies only if `tensor` is not contiguous."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return tensor
    values = tensor.detach().contiguous()
    if values.dtype in _DLPACK_DTYPES:
        return from_dlpack(to_dlpack(values))
    return torch.from_dlpack(values.reshape(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)


def owns_storage(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` covers its storage and has the only reference to it, so that it may be replaced."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or (tensor.device.type == "cpu" and storage.is_shared()):
        return False
    return storage_use_count(storage._cdata) <= 2  # the tensor's reference, and `storage` itself


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the version counter of a tensor; None for tensors from inference mode, which have no counter."""
    return None if tensor.is_inference() else tensor._version
