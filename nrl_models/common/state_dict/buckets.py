"""Buckets: buffers of bounded size that tensors are copied or gathered into, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from nrl_models.common.views.view import HFTensor

_ALIGNMENT = 16
"""Where tensors of any dtype may begin in a buffer."""


def buckets(
    tensors: Mapping[str, HFTensor],
    own: Mapping[str, torch.Tensor],
    max_bytes: int,
    device: torch.device | None = None,
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Divide Hugging Face tensors into buckets, in their order.

    Args:
        tensors: by name.
        own: the model's own tensors by name: their dtypes are the buckets'.
        max_bytes: the size of a buffer. One tensor that is larger gets a buffer of its own.
        device: of the buffers; None is that of the own tensors.

    Yields:
        A buffer of bytes without values, and the tensors in it, by name.
    """
    bucket: dict[str, int] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = torch.Size(tensor.shape).numel() * own[tensor.parameters[0]].dtype.itemsize
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if bucket and size + nbytes > max_bytes:
            yield _divided(bucket, tensors, own, device)
            bucket, size = {}, 0
        bucket[name] = nbytes
        size += nbytes
    if bucket:
        yield _divided(bucket, tensors, own, device)


def _divided(
    sizes: Mapping[str, int],
    tensors: Mapping[str, HFTensor],
    own: Mapping[str, torch.Tensor],
    device: torch.device | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A buffer for tensors that take these sizes in it, and the tensors."""
    held_by = {name: own[tensors[name].parameters[0]] for name in sizes}
    device = device or next(iter(held_by.values())).device
    buffer = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=device)
    return buffer, {
        name: part.view(held_by[name].dtype)[: torch.Size(tensors[name].shape).numel()].view(tensors[name].shape)
        for name, part in zip(sizes, buffer.split(list(sizes.values())), strict=True)
    }
