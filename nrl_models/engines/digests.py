"""Hashes of tensors, by which a trainer and an engine tell whether they hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.engine_types import NamedTensor


class Hash(Protocol):
    """What `hashed` feeds: one of hashlib's or xxhash's."""

    def update(self, data: Any, /) -> None:
        """Take bytes."""

    def hexdigest(self) -> str:
        """The hash of all bytes so far."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of a tensor's dtype, shape and elements.

    Device and strides make no difference.
    """
    return hashed(tensor, hashlib.sha256())[:32]


def hashed(tensor: torch.Tensor, digest: Hash) -> str:
    """The hexadecimal digits of a hash that is given a tensor's dtype, shape and elements."""
    value = tensor.detach().cpu().contiguous()
    digest.update(f"{dtype_name(value.dtype)} {tuple(value.shape)} ".encode())
    if value.numel():
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digested(tensors: Iterable[NamedTensor], digests: dict[str, str]) -> Iterator[NamedTensor]:
    """The same tensors; adds each one's digest to `digests` as it is read."""
    for name, tensor in tensors:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def tied_apart(name: str, source: str) -> str:
    """The message about a tensor that differs from the one that the engine's configuration ties it to."""
    return (
        f"{name} differs from {source}, and the engine's configuration ties them (tie_word_embeddings), so it has one "
        "tensor for both: start the engine on a checkpoint that the untied model saved, with tie_word_embeddings=false"
    )
