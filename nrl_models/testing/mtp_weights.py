"""Weights of multi-token prediction for tests: random tensors under the names that a model's checkpoints have."""

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
"""What a layer holds: the names that most have, in several dtypes."""


def mtp_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Random weights of as many MTP layers as the configuration announces, at least of one.

    Args:
        model: of an architecture whose checkpoints have some.
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
    """Whether checkpoints of a class have MTP weights, by what the class alone says."""
    return any(map(MTPNames.is_pattern, model_class._keys_to_ignore_on_load_unexpected or ()))


def literal(pattern: str) -> str:
    """The shortest that a pattern matches, without a dot at its end."""
    return re.sub(r"\^|\(\^\|\\\.\)|\([^()]*\)\?|\.\*|\\", "", pattern).rstrip(".")
