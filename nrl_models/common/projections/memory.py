"""Tensors that are neighbours in memory: rows of one buffer, each with a storage of its own.

Libraries find tied weights by their storage (accelerate, safetensors, transformers). Slices of one storage would look
tied to them, and all but one would be dropped when a model is saved. So each neighbour gets a storage of its own over
its rows of the buffer; and because such a storage knows nothing of the others, it is given a reference to the buffer,
which lives as long as any of its neighbours.
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
    """Memory that holds several tensors, one after the other.

    Args:
        rows: all of it: the tensors, concatenated in their first dimension.
        lengths: how many rows each tensor has.
    """

    __slots__ = ("__weakref__", "lengths", "rows")

    def __init__(self, rows: torch.Tensor, lengths: Sequence[int]) -> None:
        self.rows = rows
        self.lengths = tuple(lengths)

    def neighbours(self) -> list[torch.Tensor]:
        """The tensors in the buffer, each with a storage of its own that keeps the buffer alive."""
        result = []
        for rows in self.rows.split(self.lengths):
            neighbour = own_storage(rows)
            storage: Any = neighbour.untyped_storage()
            storage.nrl_buffer = self
            result.append(neighbour)
        return result

    def places(self) -> tuple[tuple[int, torch.Size], ...]:
        """Where each tensor is: the address of its first element, and its shape."""
        return tuple((rows.data_ptr(), rows.shape) for rows in self.rows.split(self.lengths))

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Buffer | None:
        """The buffer whose rows are exactly `tensors`, in this order; None if there is none."""
        buffer = getattr(tensors[0].untyped_storage(), "nrl_buffer", None)
        if buffer is None or buffer.lengths != tuple(len(tensor) for tensor in tensors):
            return None
        for tensor, rows in zip(tensors, buffer.rows.split(buffer.lengths), strict=True):
            same_place = tensor.data_ptr() == rows.data_ptr() and tensor.dtype == rows.dtype
            if not (same_place and tensor.shape == rows.shape and tensor.is_contiguous()):
                return None
        return buffer


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the same memory, with a storage of its own. Nothing is copied if `tensor` is contiguous."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return tensor
    values = tensor.detach().contiguous()
    if values.dtype in _DLPACK_DTYPES:
        return from_dlpack(to_dlpack(values))
    return torch.from_dlpack(values.reshape(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)


def owns_storage(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is all of its storage and nothing else references that, so that its memory may be replaced."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or (tensor.device.type == "cpu" and storage.is_shared()):
        return False
    return storage_use_count(storage._cdata) <= 2  # the tensor's reference, and `storage` itself


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None if it was made in inference mode, where torch does not count."""
    return None if tensor.is_inference() else tensor._version
