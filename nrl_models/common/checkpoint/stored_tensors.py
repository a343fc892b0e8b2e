"""Tensors of a safetensors file, from its header."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from nrl_models.common.checkpoint.json_reading import POINTER, POINTER_ADVICE, is_pointer
from nrl_models.common.upstream import str_to_torch_dtype
from nrl_models.errors import Problem, ProblemKind

DTYPES: dict[str, torch.dtype] = str_to_torch_dtype | {"F8_E8M0": torch.float8_e8m0fnu}
"""safetensors' names of dtypes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, without its values.

    Args:
        key: Name of the tensor in the file.
        file: Name of the file in the checkpoint.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        start: Offset of its first byte in the file.
    """

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def problem(self, kind: ProblemKind, detail: str) -> Problem:
        """Return a problem with this tensor."""
        return Problem(kind, self.key, detail, self.file)


def damage_of(handle: BinaryIO, file: str) -> Problem | None:
    """Return the problem with an open safetensors file whose header or size is wrong, or None.

    Args:
        handle: The file, which may have been replaced in its directory since it was opened.
        file: Name of the file in the checkpoint.
    """
    try:
        with safe_open(f"/dev/fd/{handle.fileno()}", framework="pt"):
            return None
    except (SafetensorError, OSError) as error:
        if is_pointer(os.pread(handle.fileno(), 64, 0)):
            return Problem(ProblemKind.FILE, file, POINTER, advice=POINTER_ADVICE)
        size = os.fstat(handle.fileno()).st_size
        return Problem(ProblemKind.FILE, file, f"is damaged or cut off ({size} bytes on disk): {error}")


def stored_tensors(handle: BinaryIO, file: str, problems: list[Problem]) -> Iterator[StoredTensor]:
    """Yield the tensors in the header of a safetensors file (https://huggingface.co/docs/safetensors#format)."""
    length = int.from_bytes(handle.read(8), "little")
    header: dict[str, Any] = json.loads(handle.read(length))
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            problems.append(Problem(ProblemKind.DTYPE, key, f"has dtype {entry['dtype']}; readable are {known}", file))
            continue
        start = 8 + length + entry["data_offsets"][0]
        yield StoredTensor(key, file, tuple(entry["shape"]), DTYPES[entry["dtype"]], start)
