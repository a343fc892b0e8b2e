"""How far the reference is from itself when only the order of its sums changes: the measure for all limits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nrl_models.parity.inputs import Inputs

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Differences below are never called one, per dtype (the parity guide's tolerances)."""

NOISE_FACTOR = 4.0
"""A difference may be this many times what the reference differs from itself."""


def limit(noise: float, dtype: torch.dtype) -> float:
    """The largest difference that still counts as equal."""
    return max(NOISE_FACTOR * noise, TOLERANCE[dtype])


def logits_of(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The model's logits, in fp32 on the CPU, with floating-point inputs cast to the model's dtype."""
    with torch.no_grad():
        return model(**cast(inputs, model), use_cache=False).logits.float().cpu()


def cast(inputs: Inputs, model: nn.Module) -> Inputs:
    """The inputs on the model's device, floating-point ones in its dtype."""
    parameter = next(model.parameters())
    return {
        name: value.to(parameter.device, parameter.dtype) if value.is_floating_point() else value.to(parameter.device)
        for name, value in inputs.items()
    }


def logits_noise(reference: nn.Module, inputs: Inputs) -> float:
    """Largest change of the first sequence's logits when others share its batch, or not."""
    together = logits_of(reference, inputs)[:1]
    alone = logits_of(reference, {name: value[:1] for name, value in inputs.items()})
    return (together - alone).abs().max().item()


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The loss's gradients by parameter name, in training mode; the model is left as it was."""
    was_training = model.training
    model.train()
    model.zero_grad()
    try:
        model(**cast(inputs, model), use_cache=False).loss.backward()
        return {
            name: parameter.grad.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
    finally:
        model.zero_grad()
        model.train(was_training)


def gradient_noise(reference: nn.Module, inputs: Inputs, expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """For each parameter the largest change of its gradient when the batch is in another order."""
    flipped = gradients(reference, {name: value.flip(0) for name, value in inputs.items()})
    return {name: (flipped[name] - gradient).abs().max().item() for name, gradient in expected.items()}
