"""Contiguous tensors in one buffer, each with a separate storage.

Libraries detect tied weights by their storage (accelerate, safetensors, transformers). Slices of a single storage would
look tied, and all but one would be dropped on saving. So each tensor gets a separate storage over its rows of the
buffer. Each storage holds a reference to the buffer, which keeps it alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from nrl_models.common.upstream_torch import storage_use_count

_DLPACK_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""Dtypes that pass through DLPack; others pass as bytes."""


class Buffer:
    """A buffer with several contiguous tensors.

    Args:
        rows: The complete buffer: the tensors, concatenated in their first dimension.
        lengths: Number of rows of each tensor.
    """

    __slots__ = ("__weakref__", "lengths", "rows")

    def __init__(self, rows: torch.Tensor, lengths: Sequence[int]) -> None:
        self.rows = rows
        self.lengths = tuple(lengths)

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

    def places(self) -> tuple[tuple[int, torch.Size], ...]:
        """Return the address and shape of each tensor."""
        return tuple((rows.data_ptr(), rows.shape) for rows in self.rows.split(self.lengths))

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Buffer | None:
        """Return the buffer whose rows are exactly `tensors`, in this order; None if there is none."""
        buffer = getattr(tensors[0].untyped_storage(), "nrl_buffer", None)
        if buffer is None or buffer.lengths != tuple(len(tensor) for tensor in tensors):
            return None
        for tensor, rows in zip(tensors, buffer.rows.split(buffer.lengths), strict=True):
            same_place = tensor.data_ptr() == rows.data_ptr() and tensor.dtype == rows.dtype
            if not (same_place and tensor.shape == rows.shape and tensor.is_contiguous()):
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
