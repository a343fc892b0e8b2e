"""Dequantize GGUF files on load.

As for other quantized checkpoints, keys and shapes are those of the dequantized checkpoint, and values are computed
when a tensor is read, so at most one tensor is in memory in fp32. The `gguf` package dequantizes. transformers' tables
map tensor names and revert the changes of llama.cpp's converter. So the values are bitwise equal to the values that
transformers loads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.generations import identity_at
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.gguf.gguf_header import GGUFTensor, kinds_of, nbytes_of, read_header, refused
from nrl_models.common.gguf.gguf_tables import Tables, require_package
from nrl_models.errors import Problem, ProblemKind

HALF = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Types of GGUF in which a model can be loaded."""


def open_files(path: str | Path) -> CheckpointFiles:
    """Open the checkpoint in a directory with safetensors, or in a GGUF file.

    Raises:
        CheckpointError: See `CheckpointFiles` and `GGUFFiles`.
    """
    return GGUFFiles(path) if is_gguf(path) else CheckpointFiles(path)


class GGUFFiles(CheckpointFiles):
    """Tensors of a GGUF file under transformers' names, dequantized to fp32.

    Tensors without a name in transformers' tables keep the file's name.

    Args:
        file: The GGUF file.

    Raises:
        CheckpointError: If the package `gguf` is missing, the file is damaged or one of several parts, the architecture
            or a quantization type is not supported, or tensors exceed the file.
    """

    def __init__(self, file: str | Path) -> None:
        self.folder = Path(file)
        self.seen = {self.folder.name: identity_at(self.folder)}
        require_package(self.folder)
        header = read_header(self.folder)
        self._kinds = kinds_of(header)
        self._tables = Tables(header)
        self._sources: dict[str, list[GGUFTensor]] = defaultdict(list)
        for tensor in header.tensors:
            self._sources[self._tables.target(tensor.name) or tensor.name].append(tensor)
        self.tensors = {key: self._announced(key, sources) for key, sources in self._sources.items()}
        self.dequantized = frozenset(key for key, tensor in self.tensors.items() if self.stored_as(tensor) != "F32")
        self._bytes: Any = np.memmap(self.folder, np.uint8, "r")

    @property
    def dtype(self) -> torch.dtype | None:
        """The 16-bit dtype if all tensors are floats; else fp32, which represents all values exactly."""
        names = {kind.name for kind in self._kinds.values()}
        halves = [dtype for name, dtype in HALF.items() if name in names]
        return halves[0] if halves and names <= {"F32", *HALF} else torch.float32

    @property
    def nbytes(self) -> int:
        """Stored size of all tensors in bytes."""
        return sum(
            nbytes_of(tensor, self._kinds[tensor.kind]) for tensors in self._sources.values() for tensor in tensors
        )

    def stored_as(self, tensor: StoredTensor) -> str:
        """Return GGUF's name of the tensor's type (`Q4_K`), or several names joined by plus signs."""
        return "+".join(sorted({self._kinds[source.kind].name for source in self._sources[tensor.key]}))

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the tensor's values in fp32, dequantized again in each call."""
        arrays = {source.name: self._dequantized(source) for source in self._sources[tensor.key]}
        dequantized = self._tables.undo(arrays).get(tensor.key)
        if dequantized is None or dequantized.shape != tensor.shape:
            shape = None if dequantized is None else tuple(dequantized.shape)
            detail = f"is {shape} when it is read, expected {tensor.shape}: transformers' tables do not fit the file"
            raise refused(self.folder, [tensor.problem(ProblemKind.SHAPE, detail)], "report the file's architecture")
        return dequantized

    def read_joined(self, tensors: Sequence[StoredTensor], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return None, because no tensor is stored as plain bytes."""
        return None

    def close(self) -> None:
        """Close the file."""
        self._bytes = None

    def _dequantized(self, tensor: GGUFTensor) -> np.ndarray:
        from gguf import dequantize

        kind = self._kinds[tensor.kind]
        data = self._bytes[tensor.start : tensor.start + nbytes_of(tensor, kind)]
        rows = data.reshape(*tensor.shape[:-1], -1) if tensor.shape[:-1] else data
        return dequantize(rows, kind).reshape(tensor.shape)

    def _announced(self, key: str, sources: Sequence[GGUFTensor]) -> StoredTensor:
        first = sources[0]
        if len(sources) == 1 and (self._tables.is_whole(first.name) or len(first.shape) < 3):
            shape = self._tables.shape(first.name, first.shape)
        elif any(len(tensor.shape) < 3 for tensor in sources):
            names = ", ".join(tensor.name for tensor in sources)
            problem = Problem(
                ProblemKind.DUPLICATED, key, f"is in the file under several names: {names}", self.folder.name
            )
            raise refused(self.folder, [problem], "download the file again")
        else:  # stacks of experts: gate and up are one tensor, with their rows concatenated
            shape = (first.shape[0], sum(tensor.shape[1] for tensor in sources), *first.shape[2:])
        return StoredTensor(key, self.folder.name, shape, torch.float32, first.start)
