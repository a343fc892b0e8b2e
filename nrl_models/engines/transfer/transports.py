"""Transports: how a bucket of weights gets from the trainer's process to an engine's.

A refit packs each bucket with `message_of`, and the engine's process unpacks it with `tensors_of`. A vLLM server gets
an `Update` over HTTP (`nrl_models.engines.transfer.sender`), which lists segments of shared memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer.segments import Segment

Message = list[NamedTensor] | dict[str, Any] | bytes
"""A bucket of tensors: pairs in one process, a `Segment` or a file as JSON, or the bytes of a safetensors file."""


class Transport(StrEnum):
    """Where the tensors of a message are."""

    IN_PROCESS = auto()
    """In the message itself, without a copy."""
    SHARED_MEMORY = auto()
    """In a `Segment`, which another process of this machine maps."""
    FILE = auto()
    """In a temporary safetensors file, for systems without `memfd_create`."""
    BYTES = auto()
    """In the message, serialized, for processes on other machines."""


LOCAL = Transport.SHARED_MEMORY if hasattr(os, "memfd_create") else Transport.FILE
"""Transport to a subprocess."""


@contextmanager
def message_of(bucket: list[NamedTensor], transport: Transport) -> Iterator[Message]:
    """Yield the message for a bucket. It can be unpacked until the context ends.

    Args:
        bucket: Pairs of hub name and tensor.
        transport: Where to put the tensors.
    """
    if transport is Transport.IN_PROCESS:
        yield bucket
    elif transport is Transport.SHARED_MEMORY:
        segment = Segment.write(dict(bucket))
        try:
            yield segment.to_json()
        finally:
            segment.close()
    elif transport is Transport.FILE:
        with tempfile.TemporaryDirectory(prefix="nrl-weights-") as folder:
            file = Path(folder) / "bucket.safetensors"
            file.write_bytes(_serialized(bucket))
            yield {"file": str(file)}
    else:
        yield _serialized(bucket)


def tensors_of(message: Message) -> Iterable[NamedTensor]:
    """Return the tensors of a message. They stay valid after the context of `message_of` ends."""
    if isinstance(message, bytes):
        return safetensors.torch.load(message).items()
    if not isinstance(message, dict):
        return message
    if "file" in message:
        return safetensors.torch.load_file(message["file"]).items()
    return Segment.of_json(message).read()[0].items()


def _serialized(bucket: list[NamedTensor]) -> bytes:
    # Copies, because safetensors rejects tensors that share memory.
    copies = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in bucket}
    return safetensors.torch.save(copies)
