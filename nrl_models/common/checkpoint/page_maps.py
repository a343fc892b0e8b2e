"""Concatenation in the page table: byte ranges of files, one after the other in memory, without copying.

Tensors that belong side by side in memory (the weights of a group, the experts of a stack) may lie apart in a
checkpoint. On Linux their pages can be mapped side by side, so that they are loaded lazily, as a single tensor is; only
a page that two tensors share is copied. Mappings are private: writing changes memory, never the file.
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
"""Kernels map this much of a file at once where it lies in memory as it lies in the file, modulo this size. Otherwise a
first pass over the weights takes a page fault every 64 KiB, and half as long again."""

MAX_RUNS = 4096
"""More ranges than this in one tensor are not mapped: every one takes a share of the process's
`vm.max_map_count` (65,530 by default)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes `start` to `start + nbytes` of an open file."""

    descriptor: int
    start: int
    nbytes: int


def joined(runs: Sequence[Run]) -> list[Run]:
    """The same bytes with neighbours in one file joined."""
    result: list[Run] = []
    for run in runs:
        last = result[-1] if result else None
        if last is not None and last.descriptor == run.descriptor and last.start + last.nbytes == run.start:
            result[-1] = Run(run.descriptor, last.start, last.nbytes + run.nbytes)
        else:
            result.append(run)
    return result


def map_runs(runs: Sequence[Run]) -> tuple[mmap.mmap, int] | None:
    """Memory that holds `runs` one after the other, and where in it the first begins.

    A run can be mapped if it lies in its file as it lies in memory, modulo the page size; the others
    are read. None where most would have to be read, on other systems than Linux, or with very many runs.
    """
    if sys.platform != "linux" or len(runs) > MAX_RUNS:
        return None
    positions = list(accumulate((run.nbytes for run in runs), initial=0))
    fitting: Counter[int] = Counter()  # by where memory would have to begin in a page: the bytes that fit then
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
    """Memory that holds a whole file, and where in it the file begins.

    `mmap.mmap` of a file keeps a descriptor of its own for as long as there is a tensor over it; on Linux this keeps
    none.
    """
    whole = map_runs([Run(descriptor, 0, os.fstat(descriptor).st_size)])
    return whole or (mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), 0)


def _reserve(nbytes: int) -> mmap.mmap:
    """Memory that takes nothing before it is written."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _huge_shift(runs: Sequence[Run], positions: Sequence[int], shift: int, address: int) -> int:
    """Where memory at `address` has to begin for the most bytes of the runs that fit `shift` to fit `HUGE` too."""
    fitting: Counter[int] = Counter()
    for run, position in zip(runs, positions, strict=False):
        if (run.start - position - shift) % PAGE == 0:
            fitting[(run.start - position) % HUGE] += run.nbytes
    return (fitting.most_common(1)[0][0] - address) % HUGE


def _address(memory: mmap.mmap) -> int:
    # The buffer that is exported for this is released at once: it would keep `memory` from closing.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _place(memory: mmap.mmap, position: int, run: Run) -> None:
    """Map the whole pages of `run` at `position` of `memory`, and read what is left at both ends."""
    fits = (run.start - position) % PAGE == 0
    head = min(-position % PAGE, run.nbytes) if fits else run.nbytes
    whole = (run.nbytes - head) // PAGE * PAGE
    if whole:
        _map_fixed(memory, position + head, whole, run.descriptor, run.start + head)
    _read(memory, position, run.descriptor, run.start, head)
    tail = head + whole
    _read(memory, position + tail, run.descriptor, run.start + tail, run.nbytes - tail)


def _read(memory: mmap.mmap, position: int, descriptor: int, start: int, nbytes: int) -> None:
    with memoryview(memory) as view:
        done = 0
        while done < nbytes:
            count = os.preadv(descriptor, [view[position + done : position + nbytes]], start + done)
            if count == 0:
                raise EOFError(
                    f"the file ended at byte {start + done}, {nbytes - done} bytes early: it was truncated meanwhile"
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
