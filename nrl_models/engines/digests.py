"""Digests of tensors: whether what arrived is what was sent."""

from __future__ import annotations

import hashlib

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes, in the order of its elements; 32 hexadecimal digits of it.

    Where the tensor lives and how it is strided makes no difference.
    """
    value = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} ".encode())
    if value.numel():
        digest.update(value.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]
