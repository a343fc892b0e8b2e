"""Tensors of a safetensors file, from its header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

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
