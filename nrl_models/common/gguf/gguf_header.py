"""Read the header of a GGUF file, without its tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package creates an
object for each string of the vocabulary, which takes seconds. This reader skips them.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nrl_models.common.checkpoint.json_reading import POINTER, POINTER_ADVICE, is_pointer
from nrl_models.errors import CheckpointError, Problem, ProblemKind

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Default alignment of the data, unless `general.alignment` is set."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

MOST_ELEMENTS = 4096
"""Maximum length of an array that is read: one value per layer. Arrays of the vocabulary are longer."""

INSTALL = "install the package that reads GGUF: pip install gguf"

REQUANTIZE = (
    "write it in another type with llama.cpp (llama-quantize --allow-requantize IN.gguf OUT.gguf BF16), or take the "
    "safetensors it was made from"
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a GGUF file, without its values.

    Args:
        name: llama.cpp's name of the tensor.
        shape: Shape with the contiguous dimension last.
        kind: Number of its type in `gguf.GGMLQuantizationType`.
        start: Offset of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Header of a GGUF file.

    Args:
        file: Path of the file.
        architecture: llama.cpp's name of the model.
        values: Metadata. Arrays are None unless they are short and have numbers.
        tensors: Tensors of the file.
    """

    file: Path
    architecture: str
    values: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def refused(file: Path, problems: list[Problem], *advice: str) -> CheckpointError:
    """Return the error for a GGUF file that does not load."""
    return CheckpointError(f"cannot load {file}", problems, advice)


def read_header(file: Path) -> GGUFHeader:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: If the file is not GGUF of a known version, its header is damaged or truncated, or it is one of
            several parts.
    """
    try:
        with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parsed(file, _Cursor(data))
    except CheckpointError:
        raise
    except Exception as error:  # any error of invalid bytes
        with open(file, "rb") as handle:
            if is_pointer(handle.read(64)):
                raise refused(file, [Problem(ProblemKind.FILE, file.name, POINTER)], POINTER_ADVICE) from error
        detail = f"is no GGUF file, damaged or cut off ({file.stat().st_size:,} bytes on disk): {error}"
        raise refused(file, [Problem(ProblemKind.FILE, file.name, detail)], "download the file again") from error


def _parsed(file: Path, cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != MAGIC:
        raise ValueError(f"it begins with {cursor.data[:4]!r}, expected {MAGIC!r}")
    cursor.at = 4
    version, tensor_count, value_count = cursor.take("I"), cursor.take("Q"), cursor.take("Q")
    if version not in VERSIONS:
        detail = f"is version {version} of the format; read are {' and '.join(map(str, VERSIONS))}, little-endian"
        raise refused(file, [Problem(ProblemKind.FORMAT, file.name, detail)], "convert it with a current llama.cpp")
    values: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        values[key] = cursor.value(cursor.take("I"))
    entries = []
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.take("I")
        shape = tuple(cursor.take("Q") for _ in range(dimensions))[::-1]  # stored with the contiguous dimension first
        entries.append((name, shape, cursor.take("I"), cursor.take("Q")))
    alignment = values.get("general.alignment", ALIGNMENT)
    data = math.ceil(cursor.at / alignment) * alignment
    if (parts := values.get("split.count", 0)) > 1:
        detail = f"is part {values.get('split.no', 0) + 1} of {parts}; a file with all tensors is read"
        advice = "join the parts with llama.cpp: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf"
        raise refused(file, [Problem(ProblemKind.FORMAT, file.name, detail)], advice)
    tensors = tuple(GGUFTensor(name, shape, kind, data + start) for name, shape, kind, start in entries)
    return GGUFHeader(file, str(values["general.architecture"]), values, tensors)


class _Cursor:
    """Reads the values of a header in order."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, code: str) -> Any:
        """Read a number with a `struct` format code."""
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        """Read a string."""
        length = self.take("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError(f"a string of {length:,} bytes at byte {start:,} goes past the end")
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        """Read a metadata value. An array becomes a tuple of numbers, or None if it has strings or is long."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_NUMBERS[kind])
        element, count = self.take("I"), self.take("Q")
        if element in _NUMBERS and count <= MOST_ELEMENTS:
            return tuple(self.take(_NUMBERS[element]) for _ in range(count))
        if element in _NUMBERS:
            self.at += count * struct.calcsize(_NUMBERS[element])
            return None
        for _ in range(count):
            if element == _STRING:
                length = self.take("Q")
                self.at += length
            else:
                self.value(element)
        return None


def nbytes_of(tensor: GGUFTensor, kind: GGMLQuantizationType) -> int:
    """Return the stored size in bytes of a tensor of a type."""
    from gguf import GGML_QUANT_SIZES

    elements, nbytes = GGML_QUANT_SIZES[kind]
    return math.prod(tensor.shape) // elements * nbytes


def kinds_of(header: GGUFHeader) -> dict[int, GGMLQuantizationType]:
    """Return the types of a file's tensors, by number.

    Raises:
        CheckpointError: If the package `gguf` cannot dequantize a type, or a tensor is incomplete.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    file, tensors = header.file, header.tensors
    size = file.stat().st_size
    kinds: dict[int, GGMLQuantizationType] = {}
    unread: dict[int, str] = {}
    for number in {tensor.kind for tensor in tensors}:
        try:
            kinds[number] = GGMLQuantizationType(number)
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kinds[number]][1]), np.uint8), kinds[number])
        except (ValueError, KeyError, NotImplementedError):
            unread[number] = kinds[number].name if number in kinds else f"number {number}"
    problems = [
        Problem(
            ProblemKind.DTYPE,
            tensor.name,
            f"is of type {unread[tensor.kind]}, which the package gguf does not dequantize",
            file.name,
        )
        for tensor in tensors
        if tensor.kind in unread
    ]
    if problems:
        raise refused(file, problems, REQUANTIZE)
    for tensor in tensors:
        end = tensor.start + nbytes_of(tensor, kinds[tensor.kind])
        if end > size:
            detail = f"ends at byte {end:,}, and the file at {size:,}: it is cut off"
            problems.append(Problem(ProblemKind.FILE, tensor.name, detail, file.name))
        elif tensor.shape[-1:] and tensor.shape[-1] % GGML_QUANT_SIZES[kinds[tensor.kind]][0]:
            detail = f"has rows of {tensor.shape[-1]}, not a multiple of the block size of {kinds[tensor.kind].name}"
            problems.append(Problem(ProblemKind.SHAPE, tensor.name, detail, file.name))
    if problems:
        raise refused(file, problems, "download the file again")
    return kinds
