"""Compare the inputs that engine and trainer give their text models for a prompt with images."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nrl_models.engines.vllm.vllm_images import ImageCalls


def processed_differs(theirs: ImageCalls, own: Mapping[str, torch.Tensor], tolerance: float) -> bool:
    """Return True if a tensor that both processors return under the same name differs."""
    for name, value in own.items():
        found = [call[name].float() for call in theirs.tensors if name in call]
        if found and differ(value.float().flatten(), torch.cat(found), tolerance):
            return True
    return False


def positions_differ(expected: torch.Tensor, found: torch.Tensor, length: int) -> bool:
    """Return True if positions differ by more than a constant, which has no effect on rotary embeddings."""
    expected = expected.reshape(-1, expected.shape[-1])
    found = found.reshape(-1, found.shape[-1])[:, :length].to(expected)
    expected = expected[-len(found) :]  # the first of four rows has text positions, which only masks use
    return not bool((expected - expected[:, :1] == found - found[:, :1]).all())


def differ(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    """Return True if shapes differ, or values by more than `tolerance` of their norm."""
    if expected.shape != found.shape:
        return True
    expected, found = expected.double().cpu(), found.double()
    return not bool((expected - found).norm() <= tolerance * expected.norm())
