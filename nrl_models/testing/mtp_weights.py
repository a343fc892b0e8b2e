"""Random weights of multi-token prediction for tests, under the names in a model's checkpoints."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from nrl_models.common.state_dict.mtp import MTPNames

TENSORS = {
    "eh_proj.weight": ((8, 16), torch.bfloat16),
    "enorm.weight": ((8,), torch.float32),
    "self_attn.q_proj.weight": ((16, 8), torch.bfloat16),
    "mlp.experts.0.gate_proj.weight": ((4, 8), torch.float16),
    "shared_head.norm.weight": ((8,), torch.bfloat16),
}
"""Tensors of an MTP layer: the common names, in several dtypes."""


def mtp_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return random weights for the configured number of MTP layers, at least one.

    Args:
        model: A model whose checkpoints have MTP weights.
    """
    names = MTPNames(model)
    layers = range(max(names.announced, 1))
    starts = [f"{inside}{literal(pattern.pattern)}.{layer}." for inside, pattern in names.prefixed for layer in layers]
    for inside, pattern in names.numbered:
        before = pattern.pattern.partition("(?P<")[0]
        starts += [f"{inside}{literal(before)}.{names.first + layer}." for layer in layers]
    assert starts, f"{type(model).__name__} has no MTP weights"
    return {
        f"{start}{name}": torch.randn(shape).to(dtype) for start in starts for name, (shape, dtype) in TENSORS.items()
    }


def declares_mtp(model_class: type[PreTrainedModel]) -> bool:
    """Return True if a class declares that its checkpoints have MTP weights."""
    return any(map(MTPNames.is_pattern, model_class._keys_to_ignore_on_load_unexpected or ()))


def literal(pattern: str) -> str:
    """Return the shortest match of a pattern, without a trailing dot."""
    return re.sub(r"\^|\(\^\|\\\.\)|\([^()]*\)\?|\.\*|\\", "", pattern).rstrip(".")
