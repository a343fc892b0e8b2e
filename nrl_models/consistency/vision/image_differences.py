"""Compare the inputs that engine and trainer give their text models for a prompt with images."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nrl_models.engines.vllm.vllm_images import ImageCalls


def processed_differs(theirs: ImageCalls, model_inputs: Mapping[str, torch.Tensor], tolerance: float) -> bool:
    """Return True if a tensor that both processors return under the same name differs."""
    for name, value in model_inputs.items():
        engine_tensors = [call[name].float() for call in theirs.tensors if name in call]
        if engine_tensors and differ(value.float().flatten(), torch.cat(engine_tensors), tolerance):
            return True
    return False


def positions_differ(expected: torch.Tensor, actual: torch.Tensor, length: int) -> bool:
    """Return True if positions differ by more than a constant, which has no effect on rotary embeddings."""
    expected = expected.reshape(-1, expected.shape[-1])
    actual = actual.reshape(-1, actual.shape[-1])[:, :length].to(expected)
    expected = expected[-len(actual) :]  # the first of four rows has text positions, which only masks use
    return not bool((expected - expected[:, :1] == actual - actual[:, :1]).all())


def differ(expected: torch.Tensor, actual: torch.Tensor, tolerance: float) -> bool:
    """Return True if shapes differ, or values by more than `tolerance` of their norm."""
    if expected.shape != actual.shape:
        return True
    expected, actual = expected.double().cpu(), actual.double()
    return not bool((expected - actual).norm() <= tolerance * expected.norm())
