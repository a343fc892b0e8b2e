"""Measuring the effect of rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from nrl_models.parity.noise import gradient_noise, gradients, limit, logits_noise, logits_of, rounded_otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_move_by_at_most_one_ulp(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(64, 512).to(dtype)
    x = torch.randn(32, 64, dtype=dtype)
    expected = linear(x)
    with rounded_otherwise(linear):
        moved = linear(x)
    up, down = (torch.nextafter(expected, expected.new_tensor(end)) for end in (torch.inf, -torch.inf))
    assert ((moved == expected) | (moved == up) | (moved == down)).all()
    assert 0.05 < (moved != expected).float().mean() < 0.95
    assert torch.equal(linear(x), expected)


def test_logits_noise_has_size_of_rounding(llama: PreTrainedModel, input_ids: torch.Tensor) -> None:
    inputs = {"input_ids": input_ids}
    scale = logits_of(llama, inputs).abs().max().item()
    noise = logits_noise(llama, inputs)
    assert 1e-8 * scale < noise < 1e-5 * scale
    assert noise == logits_noise(llama, inputs)  # deterministic


def test_gradient_noise_per_parameter(llama: PreTrainedModel, input_ids: torch.Tensor) -> None:
    inputs = {"input_ids": input_ids, "labels": input_ids}
    expected = gradients(llama, inputs)
    noise = gradient_noise(llama, inputs, expected)
    assert noise.keys() == expected.keys()
    assert all(
        noise[name] < 1e-4 * gradient.abs().max() + 1e-9
        for name, gradient in expected.items()
        if "k_proj.bias" not in name
    )
    assert sum(change > 0 for change in noise.values()) > len(noise) / 2


def test_limit_is_at_least_dtype_tolerance() -> None:
    assert limit(0.0, torch.bfloat16) == 1e-2
    assert limit(0.3, torch.bfloat16) == 0.6
