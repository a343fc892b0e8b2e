"""Messages that take the tensors of a refit to vLLM's workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import safetensors.torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer.segments import Segment

Message = list[NamedTensor] | dict[str, Any] | bytes
"""A bucket of tensors: pairs in one process, a `Segment` of shared memory as JSON, or a safetensors file."""


@contextmanager
def message_of(bucket: list[NamedTensor], config: Any, *, in_process: bool) -> Iterator[Message]:
    """Yield the message for a bucket. Its memory is freed at the end.

    Args:
        bucket: Pairs of hub name and tensor.
        config: Configuration of vLLM.
        in_process: Whether the worker runs in this process.
    """
    if in_process:
        yield bucket
    elif not hasattr(os, "memfd_create") or config.parallel_config.distributed_executor_backend == "ray":
        # Workers may run on other machines.
        yield safetensors.torch.save({name: tensor.contiguous() for name, tensor in bucket})
    else:
        segment = Segment.write(dict(bucket))
        try:
            yield segment.to_json()
        finally:
            segment.close()


def tensors_of(message: Message) -> Iterable[NamedTensor]:
    """Return the tensors of a message."""
    if isinstance(message, bytes):
        return safetensors.torch.load(message).items()
    return Segment.of_json(message).read()[0].items() if isinstance(message, dict) else message
