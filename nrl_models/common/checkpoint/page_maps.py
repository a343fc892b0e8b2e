"""Concatenate byte ranges of files in memory by mapping their pages, without copying.

Weights of a fused group and experts of a stack are contiguous in memory, but not always in a checkpoint. On Linux their
pages can be mapped to consecutive addresses, so they load lazily, like a single tensor. Only a page that two tensors
share is copied. Mappings are private: writing changes memory, never the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

PAGE = mmap.PAGESIZE

HUGE = 2**21
"""Kernels map this many bytes of a file at once if memory address and file offset are equal modulo this size.
Otherwise, the first pass over the weights has a page fault every 64 KiB, and takes 50% longer."""

MAX_RUNS = 4096
"""Maximum number of ranges in a mapped tensor, because each uses up part of the process's `vm.max_map_count` (65,530 by
default)."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `start + nbytes` of an open file."""

    descriptor: int
    start: int
    nbytes: int


def joined(runs: Sequence[ByteRange]) -> list[ByteRange]:
    """Merge runs that are adjacent in the same file."""
    result: list[ByteRange] = []
    for run in runs:
        last = result[-1] if result else None
        if last is not None and last.descriptor == run.descriptor and last.start + last.nbytes == run.start:
            result[-1] = ByteRange(run.descriptor, last.start, last.nbytes + run.nbytes)
        else:
            result.append(run)
    return result


def map_runs(runs: Sequence[ByteRange]) -> tuple[mmap.mmap, int] | None:
    """Map `runs` to consecutive memory. Returns the memory, and the offset of the first run.

    A run can be mapped if its file offset and memory address are equal modulo the page size; other runs are read. None
    if most would have to be read, if there are too many runs, or on systems other than Linux.
    """
    if sys.platform != "linux" or len(runs) > MAX_RUNS:
        return None
    positions = list(accumulate((run.nbytes for run in runs), initial=0))
    fitting: Counter[int] = Counter()  # number of mappable bytes by offset of the memory in a page
    for run, position in zip(runs, positions, strict=False):
        fitting[(run.start - position) % PAGE] += run.nbytes
    shift, mapped = fitting.most_common(1)[0]
    if mapped < positions[-1] / 2:
        return None
    if positions[-1] < HUGE:
        memory = _reserve(shift + positions[-1])
    else:
        memory = _reserve(HUGE + positions[-1])
        shift = _huge_shift(runs, positions, shift, _address(memory))
    for run, position in zip(runs, positions, strict=False):
        _place(memory, shift + position, run)
    return memory, shift


def map_file(descriptor: int) -> tuple[mmap.mmap, int]:
    """Map a complete file. Returns the memory and the file's offset in it.

    `mmap.mmap` keeps a file descriptor open as long as a tensor uses the memory. On Linux, this function does not.
    """
    mapping = map_runs([ByteRange(descriptor, 0, os.fstat(descriptor).st_size)])
    return mapping or (mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), 0)


def _reserve(nbytes: int) -> mmap.mmap:
    """Reserve memory. The kernel allocates each page on its first write."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _huge_shift(runs: Sequence[ByteRange], positions: Sequence[int], shift: int, address: int) -> int:
    """Return the offset from `address` at which the most bytes have equal file and memory offsets modulo `HUGE`.

    Counts only runs whose pages fit `shift`, their offset modulo the page size.
    """
    fitting: Counter[int] = Counter()
    for run, position in zip(runs, positions, strict=False):
        if (run.start - position - shift) % PAGE == 0:
            fitting[(run.start - position) % HUGE] += run.nbytes
    return (fitting.most_common(1)[0][0] - address) % HUGE


def _address(memory: mmap.mmap) -> int:
    # Release the exported buffer at once, because it would prevent `memory` from closing.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _place(memory: mmap.mmap, position: int, run: ByteRange) -> None:
    """Map the complete pages of `run` at `position` of `memory`, and read the rest at both ends."""
    fits = (run.start - position) % PAGE == 0
    head = min(-position % PAGE, run.nbytes) if fits else run.nbytes
    page_bytes = (run.nbytes - head) // PAGE * PAGE
    if page_bytes:
        _map_fixed(memory, position + head, page_bytes, run.descriptor, run.start + head)
    _read(memory, position, run.descriptor, run.start, head)
    tail = head + page_bytes
    _read(memory, position + tail, run.descriptor, run.start + tail, run.nbytes - tail)


def _read(memory: mmap.mmap, position: int, descriptor: int, start: int, nbytes: int) -> None:
    with memoryview(memory) as view:
        done = 0
        while done < nbytes:
            count = os.preadv(descriptor, [view[position + done : position + nbytes]], start + done)
            if count == 0:
                raise EOFError(
                    f"the file ended at byte {start + done}, {nbytes - done} bytes early: it was truncated since"
                )
            done += count


_libc = ctypes.CDLL(None, use_errno=True)
_MAP_FIXED = 0x10


def _map_fixed(memory: mmap.mmap, position: int, nbytes: int, descriptor: int, start: int) -> None:
    """Replace anonymous pages by pages of a file. They are unmapped together with `memory`."""
    address = _address(memory) + position
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc.mmap(address, nbytes, protection, flags, descriptor, start) != address:
        raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
