"""Buckets: buffers of bounded size that tensors are copied or gathered into, one after the other.

Fresh memory of the operating system costs several times a copy, because each page is zeroed on first use. So a model's
buffers on a CPU are reused as soon as no tensor uses them, also by its next export; usually two alternate. CUDA's
allocator reuses memory by itself.

A consumer may keep a tensor. Its buffer then stays as it is until its last tensor is freed, and another one is
allocated. So kept values are never overwritten, and a consumer that keeps every tensor holds as much memory as a copy
of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from threading import Lock
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from nrl_models.common.upstream_torch import foreach_copy
from nrl_models.common.views.view import HFTensor, strides_of
from nrl_models.errors import EngineError

T = TypeVar("T")

_ALIGNMENT = 16
"""Where tensors of any dtype may begin in a buffer."""

KEPT_BUFFERS = 2
"""Number of buffers that are kept for reuse."""

CACHED_BYTES = 2**20
"""Bytes that a CPU copies before the consumer reads them, so that they are still in its cache."""


class BufferPool:
    """Allocates byte buffers. A buffer is reused when all its tensors are freed.

    The pool keeps the last `KEPT_BUFFERS` buffers. Threads may share it.

    Args:
        device: Device of the buffers.
        pinned: Whether buffers on a CPU are pinned, for copies from and to a GPU.
    """

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self.device, self._pinned = device, pinned
        self._memory: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []
        self._lock = Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer without values: `(nbytes,)` uint8."""
        if self.device.type != "cpu" or self._pinned:  # whose allocators reuse memory
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)
        # A tensor's memory keeps `lent` alive, also through views of the tensor, so its weak reference tells when all
        # are freed.
        with self._lock:
            fits = (memory.size >= nbytes and lent() is None for memory, lent in self._memory)
            free = next((index for index, is_free in enumerate(fits) if is_free), None)
            memory = np.empty(nbytes, dtype=np.uint8) if free is None else self._memory.pop(free)[0]
            lent = memory[:nbytes]
            self._memory = [*self._memory, (memory, weakref.ref(lent))][-KEPT_BUFFERS:]
        return torch.from_numpy(lent)


_pools: weakref.WeakKeyDictionary[nn.Module, BufferPool] = weakref.WeakKeyDictionary()


def pool_of(model: nn.Module, device: torch.device) -> BufferPool:
    """Return the pool of a model's exports. It is freed with the model."""
    pool = _pools.get(model)
    if pool is None or pool.device != device:
        pool = _pools[model] = BufferPool(device)
    return pool


def bucket_buffers(
    tensors: Mapping[str, HFTensor], model_tensors: Mapping[str, torch.Tensor], max_bytes: int, pool: BufferPool
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Divide Hugging Face tensors into buckets, in order.

    Args:
        tensors: Tensors by name.
        model_tensors: The model's own tensors by name, which define the dtypes.
        max_bytes: Maximum size of a buffer. A larger tensor gets a separate buffer.
        pool: Allocates the buffers.

    Yields:
        An uninitialized byte buffer, and the tensors in it by name.
    """
    parts = {
        name: _Part(model_tensors[tensor.pieces[0].view.parameter].dtype, tensor.shape)
        for name, tensor in tensors.items()
    }
    for names in grouped(((name, part.nbytes) for name, part in parts.items()), max_bytes):
        buffer, divided = _divided(pool, [parts[name] for name in names])
        bucket = dict(zip(names, divided, strict=True))
        del divided
        yield buffer, bucket
        del buffer, bucket  # free for reuse, unless the consumer keeps them


class _Part:
    """Dtype and shape of a tensor in a buffer, and the bytes that it takes there."""

    __slots__ = ("dtype", "nbytes", "shape")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.nbytes = -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _divided(pool: BufferPool, parts: Sequence[_Part]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a buffer for tensors, and the tensors in it."""
    buffer = pool.take(sum(part.nbytes for part in parts))
    of_dtype = {dtype: buffer.view(dtype) for dtype in {part.dtype for part in parts}}
    tensors = []
    start = 0
    for part in parts:
        memory = of_dtype[part.dtype]
        tensors.append(memory.as_strided(part.shape, strides_of(part.shape), start // part.dtype.itemsize))
        start += part.nbytes
    return buffer, tensors


def grouped(sizes: Iterable[tuple[T, int]], max_bytes: int | None) -> Iterator[list[T]]:
    """Group items with sizes into lists of `max_bytes` at most, in order. A larger item gets a separate list.

    A list is emptied when the next one is requested, so that it keeps no item alive that the consumer has not taken.

    Args:
        sizes: Items, each with its size in bytes.
        max_bytes: Maximum sum of sizes; None for a single list.
    """
    group: list[T] = []
    total = 0
    for item, nbytes in sizes:
        if group and max_bytes is not None and total + nbytes > max_bytes:
            yield group
            group.clear()
            total = 0
        group.append(item)
        total += nbytes
    if group:
        yield group


class YieldedTensor:
    """A named tensor that is still in use, and its version when a generator yielded it."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        # Inference tensors have no version, so a change could not be detected.
        self.name, self.tensor = name, tensor.clone() if tensor.is_inference() else tensor
        self.renew()

    def renew(self) -> None:
        """Record the current version."""
        self.version = 0 if self.tensor.is_inference() else self.tensor._version

    def may_have_changed(self) -> bool:
        """Return True if the tensor, or another one of the same buffer, was modified in place."""
        return not self.tensor.is_inference() and self.tensor._version != self.version

    def is_complete_buffer(self) -> bool:
        """Return True if no other tensor can be in the same buffer."""
        return self.tensor.untyped_storage().nbytes() <= self.tensor.nbytes

    def memory(self) -> tuple[str, int, int]:
        """Return the device, and the addresses of the first byte and after the last one."""
        last = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        start = self.tensor.data_ptr()
        return str(self.tensor.device), start, start + (last + 1) * self.tensor.element_size()

    def overlaps(self, other: YieldedTensor) -> bool:
        """Return True if the two have a byte in common. Columns of one matrix lie between each other, and have none."""
        return np.shares_memory(np.asarray(_Addresses(self.tensor)), np.asarray(_Addresses(other.tensor)))


class _Addresses:
    """The memory of a tensor on any device, as NumPy describes it. It must not be read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "version": 3,
        }


def grouped_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int | None
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group tensors of a generator into buckets, see `grouped`. Inference tensors are copied.

    Args:
        tensors: Pairs of name and tensor.
        max_bytes: Maximum sum of sizes; None for a single bucket.

    Raises:
        EngineError: If the generator modified a tensor before its bucket was complete, for example because it reuses a
            buffer.
    """
    latest: list[YieldedTensor] = []

    def waiting() -> Iterator[tuple[YieldedTensor, int]]:
        for name, tensor in tensors:
            latest[:] = [YieldedTensor(name, tensor)]
            yield latest[0], tensor.nbytes

    for group in grouped(waiting(), max_bytes):
        require_unchanged(group if group[-1] is latest[0] else [*group, *latest], "its bucket was complete")
        bucket = [(item.name, item.tensor) for item in group]
        yield bucket
        bucket.clear()
        latest[0].renew()  # an engine may have written its own tensors


def require_unchanged(items: Sequence[YieldedTensor], event: str) -> None:
    """Check that no tensor was modified since it was yielded.

    Tensors of one buffer also share its version. So a tensor in a larger buffer counts as modified only if its version
    changed and another tensor was yielded in the same memory.

    Args:
        items: The tensors.
        event: The event until which tensors must not change, for the error message.

    Raises:
        EngineError: If a tensor was modified.
    """
    candidates = {item for item in items if item.tensor.numel() and item.may_have_changed()}
    changed = {item for item in candidates if item.is_complete_buffer()}
    if candidates - changed:
        reaching: list[tuple[tuple[str, int], YieldedTensor]] = []
        for item in sorted((item for item in items if item.tensor.numel()), key=YieldedTensor.memory):
            device, start, stop = item.memory()
            reaching = [(end, before) for end, before in reaching if end > (device, start)]
            for _, before in reaching:
                if (pair := candidates & {before, item}) and before.overlaps(item):
                    changed |= pair
            reaching.append(((device, stop), item))
    if changed:
        name = next(item.name for item in items if item in changed)
        raise EngineError(
            f"{name} was changed after the generator yielded it, before {event}: yield a copy (tensor.clone())"
        )


def filled(
    bucket: dict[str, torch.Tensor],
    tensors: Mapping[str, HFTensor],
    values: Mapping[str, torch.Tensor],
    max_bytes: int | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy values into the tensors of a bucket, and yield the tensors. Each element is copied once.

    Args:
        bucket: Tensors of a bucket by name.
        tensors: Hugging Face tensors by name.
        values: The model's own tensors by name.
        max_bytes: Bytes to copy before the first tensor of them is yielded; None for the complete bucket.
    """
    for names in grouped(((name, tensor.nbytes) for name, tensor in bucket.items()), max_bytes):
        copy_all([pair for name in names for pair in tensors[name].copies(bucket[name], values)])
        yield from ((name, bucket[name]) for name in names)


def exported_values(
    model: nn.Module,
    tensors: Mapping[str, HFTensor],
    model_tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    max_bytes: int | None,
    *,
    one_at_a_time: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face tensors of a model, as views or in buffers.

    Args:
        model: The model, whose pool of buffers is used.
        tensors: Hugging Face tensors by name.
        model_tensors: The model's own tensors by name, which define dtypes and device.
        values: The values by own name.
        max_bytes: Maximum size of a buffer. None yields views.
        one_at_a_time: Whether to copy each tensor when it is yielded. Merged and gathered tensors need memory until
            they are copied.
    """
    if max_bytes is None:
        yield from ((name, tensor.read(values)) for name, tensor in tensors.items())
    elif tensors:
        device = model_tensors[next(iter(tensors.values())).pieces[0].view.parameter].device
        ahead = 0 if one_at_a_time else CACHED_BYTES if device.type == "cpu" else None
        for _, bucket in bucket_buffers(tensors, model_tensors, max_bytes, pool_of(model, device)):
            yield from filled(bucket, tensors, values, ahead)


def on_host(bucket: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Copy the tensors of a bucket that are on a GPU into pinned host memory. Tensors on a CPU are not copied."""
    sources = {name: tensor for name, tensor in bucket if _is_on_gpu(tensor)}
    if not sources:
        return list(bucket)
    pool = BufferPool(torch.device("cpu"), pinned=torch.cuda.is_available())
    _, copies = _divided(pool, [_Part(tensor.dtype, tuple(tensor.shape)) for tensor in sources.values()])
    copy_all(list(zip(copies, sources.values(), strict=True)), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    copied = dict(zip(sources, copies, strict=True))
    return [(name, copied.get(name, tensor)) for name, tensor in bucket]


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], *, non_blocking: bool = False) -> None:
    """Copy a list of tensors, given as pairs of target and source. A GPU does it in a few kernels.

    Args:
        copies: Targets and sources of equal shapes.
        non_blocking: Whether copies between a GPU and pinned memory may still run afterwards.
    """
    # torch has kernels for many tensors if all have one dtype and the layout of their targets.
    alike: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in copies:
        key = source.dtype, source.stride() == target.stride()
        targets, sources = alike.setdefault(key, ([], []))
        targets.append(target)
        sources.append(source)
    with torch.no_grad():
        for targets, sources in alike.values():
            foreach_copy(targets, sources, non_blocking)
