"""Buckets: buffers of bounded size that tensors are copied or gathered into, one after the other.

Fresh memory of the operating system costs several times a copy, because each page is zeroed on first use. So buffers on
a CPU are reused as soon as no tensor uses them; usually two alternate. CUDA's allocator reuses memory by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from nrl_models.common.views.view import HFTensor

_ALIGNMENT = 16
"""Where tensors of any dtype may begin in a buffer."""

KEPT_BUFFERS = 2
"""Number of buffers that are kept for reuse."""


class BufferPool:
    """Allocates byte buffers. A buffer is reused when all its tensors are freed.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer without values: `(nbytes,)` uint8."""
        if self._device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # A tensor's memory keeps `lent` alive, also through views of the tensor, so its weak reference tells when all
        # are freed.
        free = [index for index, (memory, lent) in enumerate(self._memory) if lent() is None and memory.size >= nbytes]
        memory = self._memory.pop(free[0])[0] if free else np.empty(nbytes, dtype=np.uint8)
        lent = memory[:nbytes]
        self._memory = [*self._memory, (memory, weakref.ref(lent))][-KEPT_BUFFERS:]
        return torch.from_numpy(lent)


def buckets(
    tensors: Mapping[str, HFTensor],
    own: Mapping[str, torch.Tensor],
    max_bytes: int,
    device: torch.device | None = None,
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Divide Hugging Face tensors into buckets, in order.

    Args:
        tensors: Tensors by name.
        own: The model's own tensors by name, which define the dtypes.
        max_bytes: Maximum size of a buffer. A larger tensor gets a separate buffer.
        device: Device of the buffers; None uses that of the own tensors.

    Yields:
        An uninitialized byte buffer, and the tensors in it by name.
    """
    if not tensors:
        return
    pool = BufferPool(device or own[next(iter(tensors.values())).parameters[0]].device)
    bucket: dict[str, int] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = torch.Size(tensor.shape).numel() * own[tensor.parameters[0]].dtype.itemsize
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if bucket and size + nbytes > max_bytes:
            yield _divided(bucket, tensors, own, pool)
            bucket, size = {}, 0
        bucket[name] = nbytes
        size += nbytes
    if bucket:
        yield _divided(bucket, tensors, own, pool)


def _divided(
    sizes: Mapping[str, int],
    tensors: Mapping[str, HFTensor],
    own: Mapping[str, torch.Tensor],
    pool: BufferPool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A buffer for tensors that take these sizes in it, and the tensors."""
    held_by = {name: own[tensors[name].parameters[0]] for name in sizes}
    buffer = pool.take(sum(sizes.values()))
    return buffer, {
        name: part.view(held_by[name].dtype)[: torch.Size(tensors[name].shape).numel()].view(tensors[name].shape)
        for name, part in zip(sizes, buffer.split(list(sizes.values())), strict=True)
    }
