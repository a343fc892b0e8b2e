"""Section `load`: loading a checkpoint to the device, against transformers and pinned copies of the same bytes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import local
from typing import Any

import torch
import transformers

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.models import AGAIN, UPSTREAM, alternate, config_of, contender, labeled, ratio
from benchmarks.gpu.outcomes import CheckError
from benchmarks.reporting import Row
from benchmarks.train_step import Peak
from nrl_models import AutoModelForCausalLM

OURS, PINNED = "nrl_models", "pinned copies"

CHUNK = 2**26
"""Bytes that a thread reads and copies at once."""

THREADS = min(8, os.cpu_count() or 1)


def cases(context: Context) -> dict[str, Case]:
    """Return a case per shape."""
    return {shape: partial(_compare, shape, context) for shape in ("Llama 1B", "Qwen3-MoE 30B-A3B")}


def _compare(shape: str, context: Context) -> list[Row]:
    transformers.utils.logging.disable_progress_bar()
    config = config_of(shape, context, bytes_per_parameter=2 * 2)
    with TemporaryDirectory() as name:
        folder = Path(name)
        contender(UPSTREAM, config, context).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        ours = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.bfloat16, device=context.device)
        theirs = partial(
            transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.bfloat16, device_map=context.device
        )
        copies = PinnedCopies(files, context.device)
        rises = {UPSTREAM: _rise(theirs), OURS: _rise(ours)}
        differing = _differing(ours(), theirs())
        ways: dict[str, Callable[[], object]] = {UPSTREAM: theirs, AGAIN: theirs, OURS: ours, PINNED: copies}
        runs, warm_up = (2, 1) if context.tiny else (5, 1)
        seconds = alternate(ways, context.device, runs, warm_up, between=_free)
    rows: list[Row] = [
        {
            "checkpoint": labeled(shape, config),
            "way": name,
            "GB": size / 1e9,
            "seconds": median(took),
            "GB/s": size / 1e9 / median(took),
            "time / transformers": ratio(seconds, name, UPSTREAM),
            "time / pinned copies": ratio(seconds, name, PINNED),
            "device memory / model": rises[name] / size if name in rises else "",
        }
        for name, took in seconds.items()
    ]
    if differing:
        raise CheckError(f"tensors differ from those that transformers loads: {', '.join(differing[:4])}", rows)
    return rows


def _free() -> None:
    """Free the result of the previous run, so that each run allocates as the first."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _rise(load: Callable[[], object]) -> int:
    _free()
    with Peak() as peak:
        load()
    return peak.rise


def _differing(ours: Any, theirs: Any) -> list[str]:
    """Return the names of tensors that differ between two models."""
    expected, actual = theirs.state_dict(), ours.state_dict()
    names = [name for name in expected if name not in actual or not torch.equal(expected[name], actual[name])]
    return names + sorted(actual.keys() - expected.keys())


class PinnedCopies:
    """Read files into pinned memory in several threads, and copy them to the device. A lower bound for loading.

    Args:
        files: The files.
        device: The device. On a CPU, the bytes are copied to ordinary memory.
    """

    def __init__(self, files: list[Path], device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.chunks = [
            (file, start, min(CHUNK, file.stat().st_size - start))
            for file in files
            for start in range(0, file.stat().st_size, CHUNK)
        ]
        self.pool = ThreadPoolExecutor(THREADS)
        self.threads = local()

    def __call__(self) -> list[torch.Tensor]:
        """Return the bytes on the device, in chunks."""
        return list(self.pool.map(self._copy, self.chunks))

    def _copy(self, chunk: tuple[Path, int, int]) -> torch.Tensor:
        file, start, size = chunk
        if not hasattr(self.threads, "buffer"):
            self.threads.buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self.is_cuda)
            self.threads.stream = torch.cuda.Stream(self.device) if self.is_cuda else None
        buffer = self.threads.buffer[:size]
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            if stream.readinto(memoryview(buffer.numpy())) != size:
                raise OSError(f"{file}: read less than {size} bytes at {start}")
        if not self.is_cuda:
            return buffer.clone()
        with torch.cuda.stream(self.threads.stream):
            copied = buffer.to(self.device, non_blocking=True)
        self.threads.stream.synchronize()  # the buffer is read into again
        return copied
