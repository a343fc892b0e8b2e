"""The rounding difference of the reference from itself. All limits are derived from it.

A hand-picked limit either misses bugs, or fails on machines that sum in another order. Here, the reference runs again
with the output of each linear layer randomly changed by up to half a unit in the last place, as another summation order
would do (random rounding, as in the CESTAC method of Vignes, 1993).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from nrl_models.common.forward.evaluation import modes_kept
from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.forward.routing import RoutingRecord, flip_rate, record_routing, replay_routing
from nrl_models.common.modules import device_of, is_base_model
from nrl_models.inputs.image_geometry import Inputs
from nrl_models.inputs.images import cast

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Difference that always passes, by dtype (the parity guide's tolerances)."""

SEED = 0
"""Random seed of dropout, and of the loss of base models."""

NOISE_FACTOR = 2.0
"""Limit of a difference, as a multiple of the rounding difference."""


def limit(noise: float, dtype: torch.dtype) -> float:
    """Return the largest difference that still counts as equal."""
    return max(NOISE_FACTOR * noise, TOLERANCE[dtype])


def output_name(model: nn.Module) -> str:
    """Return the name of the values that `logits_of` returns, for reports."""
    return "hidden states" if is_base_model(model) else "logits"


def logits_of(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Compute the model's logits, returned in fp32 on the CPU. Floating-point inputs are cast to the model's dtype.

    For a base model, returns the last hidden states.
    """
    with torch.no_grad():
        output = model(**cast(inputs, model), use_cache=False)
    return (output[0] if is_base_model(model) else output.logits).float().cpu()


def logits_and_routing(model: nn.Module, inputs: Inputs) -> tuple[torch.Tensor, RoutingRecord]:
    """Compute the model's logits, and record its expert choices."""
    with record_routing(model) as routing:
        return logits_of(model, inputs), routing


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Randomly round the output of every linear layer of `model` up or down, inside a `with` block.

    Linear layers with more than one output (some routers) are not changed.
    """
    device = device_of(model)
    generator = torch.Generator(device).manual_seed(0)

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        share = torch.rand(output.shape, generator=generator, device=output.device, dtype=torch.float32) - 0.5
        return output + output * (share * torch.finfo(output.dtype).eps).to(output.dtype)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_hook(move).remove)
        yield


def logits_noise(reference: nn.Module, inputs: Inputs, routing: RoutingRecord | None = None) -> float:
    """Return the largest change of the logits under other rounding, optionally with `routing`'s experts."""
    expected = logits_of(reference, inputs)
    with rounded_otherwise(reference), replay_routing(reference, routing or {}):
        return (expected - logits_of(reference, inputs)).abs().max().item()


def routing_noise(reference: nn.Module, inputs: Inputs, routing: RoutingRecord) -> float:
    """Return the fraction of expert choices that change when the reference rounds differently."""
    with rounded_otherwise(reference):
        return flip_rate(routing, logits_and_routing(reference, inputs)[1])


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Compute the loss's gradients by parameter name, in training mode. Restores the model afterwards.

    A base model has no loss, so a fixed random linear function of its hidden states is used. Dropout is also fixed.
    """
    with modes_kept(model):
        model.train()
        model.zero_grad()
        try:
            with random_states_kept():
                torch.manual_seed(SEED)
                output = model(**cast(inputs, model), use_cache=False)
            loss = _any_loss(output[0]) if is_base_model(model) else output.loss
            loss.backward()
            return {
                name: parameter.grad.detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        finally:
            model.zero_grad()


def _any_loss(hidden_states: torch.Tensor) -> torch.Tensor:
    direction = torch.randn(hidden_states.shape, generator=torch.Generator().manual_seed(SEED))
    return (hidden_states.float() * direction.to(hidden_states.device)).mean()


def gradient_noise(reference: nn.Module, inputs: Inputs, expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest change of each parameter's gradient when the reference rounds differently."""
    with rounded_otherwise(reference):
        moved = gradients(reference, inputs)
    return {name: (moved[name] - gradient).abs().max().item() for name, gradient in expected.items()}
