"""Safetensors files that are hashed while they are written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from nrl_models.common.checkpoint import tensor_files
from nrl_models.common.checkpoint.stored_tensors import DTYPES
from nrl_models.common.checkpoint.tensor_files import write_tensors

PACKED = getattr(torch, "float4_e2m1fn_x2", None)
"""Two values in each byte: safetensors counts the values, torch the bytes."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Create a tensor from random bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype != PACKED], ids=str)
def test_file_matches_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {"b": values(dtype, 3, 5), "a.é": values(dtype, 7), "scalar": values(dtype), "none": values(dtype, 0, 4)}
    size, digest = write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert (size, digest) == (len(data), xxhash.xxh3_128_hexdigest(data))


def test_mixed_dtypes_are_aligned_and_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"{number}": values(dtype, 3) for number, dtype in enumerate(DTYPES.values()) if dtype != PACKED}
    tensors["transposed"] = torch.randn(4, 6).T
    tensors["sliced"] = torch.randn(10, 10)[3:5, ::2]
    write_tensors(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == tensor.dtype
        assert torch.equal(bits(found[name]), bits(tensor))
        assert found[name].data_ptr() % tensor.dtype.itemsize == 0


def test_hash_of_multi_chunk_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    size, digest = write_tensors(tmp_path / "file", {"a": torch.randn(12_345), "b": torch.randn(250)})
    with open(tmp_path / "file", "rb") as handle:
        assert hashlib.file_digest(handle, xxhash.xxh3_128).hexdigest() == digest
        assert handle.tell() == size


def test_partial_writes_are_continued(tmp_path: Path) -> None:
    class Slow:
        written = b""

        def write(self, data: memoryview) -> int:
            self.written += bytes(data[:7])
            return min(7, len(data))

    slow: Any = Slow()
    tensor_files._write_all(slow, memoryview(bytes(range(100))))
    assert slow.written == bytes(range(100))
