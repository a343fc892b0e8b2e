"""Write safetensors files and compute their hash in the same pass.

`safetensors.save_file` does not return a hash, so the file would have to be read again. Here, each chunk is hashed and
written while it is in the processor's cache.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from nrl_models.common.checkpoint.publication.durable import is_durable
from nrl_models.common.checkpoint.stored_tensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_BYTES = 2**19


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write a safetensors file, and sync it to disk.

    Args:
        file: The new file.
        tensors: Tensors by name. Tensors on other devices, and tensors that are not contiguous, are copied one by one.

    Returns:
        Size of the file in bytes, and its hash (xxh3, 128 bits) in hexadecimal digits.

    Raises:
        OSError: If the file cannot be written.
    """
    import xxhash  # only saving needs it

    digest, size = xxhash.xxh3_128(), 0
    with open(file, "wb", buffering=0) as handle:

        def write(data: memoryview) -> None:
            nonlocal size
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                _write_all(handle, chunk)
            size += len(data)

        names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # keeps all of them aligned
        write(memoryview(_header({name: tensors[name] for name in names})))
        for name in names:
            write(_bytes_of(tensors[name]))
        if is_durable():
            os.fsync(handle.fileno())
    return size, digest.hexdigest()


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the beginning of a file with `tensors` in this order: the length of a JSON object, and the object."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    values = tensor.detach().to("cpu").contiguous().reshape(-1)
    return values.view(torch.uint8).numpy().data if values.numel() else memoryview(b"")


def _write_all(handle: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[handle.write(data) :]
