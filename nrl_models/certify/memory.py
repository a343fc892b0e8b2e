"""Memory that checks need, and that is available."""

from __future__ import annotations

import psutil
import torch

from nrl_models.certify.certified import Subject

BYTES = 4
"""Bytes per parameter: checks compute in fp32."""


def needed_memory(subject: Subject, copies: int) -> str:
    """Return how much memory is missing for copies of the weights in fp32; empty if there is enough.

    Args:
        subject: the checkpoint and the device of the trainer.
        copies: number of copies that are held at the same time. One may be held already, and counts as available.
    """
    needed = copies * BYTES * subject.parameters
    available = _available(torch.device(subject.options.device)) + subject.held_bytes
    if needed <= available:
        return ""
    return (
        f"needs {_gigabytes(needed)} of memory for {copies} cop{'y' if copies == 1 else 'ies'} of the weights in fp32, "
        f"{_gigabytes(available)} are available; use a larger machine, or check some layers (--layers 4)"
    )


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
