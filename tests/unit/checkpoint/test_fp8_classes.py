"""FP8 formats in the classes whose published checkpoints have them: renamed scales, stacked experts, towers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import assert_same, edit_config, edit_weights, stored
from test_dequantized import Form, e8m0_and_fp4, mistral_names, per_tensor, static_scheme

import nrl_models
from nrl_models import registry
from nrl_models.testing.case import FamilyCase

GROUP = 32
"""Columns per scale of MXFP8."""


def mistral_experts(key: str, weight: torch.Tensor) -> Form:
    """Experts are stacked, with one scale for all of them."""
    if weight.ndim == 2:
        return mistral_names(key, weight)
    values, scale = per_tensor(weight)
    tensors = {key: values, f"{key}_scale_inv": scale[None], f"{key}_activation_scale": torch.ones(1)}
    return tensors, values.float() * scale


def groups_of_32(key: str, weight: torch.Tensor) -> Form:
    """One exponent in uint8 per group of columns, as `w13_weight_scale` next to `w13_weight`."""
    largest = weight.unflatten(-1, (-1, GROUP)).abs().amax(-1).clamp_min(1e-6)
    biased = ((largest / 448).log2().ceil() + 127).to(torch.uint8)
    scales = torch.exp2(biased.float() - 127).repeat_interleave(GROUP, -1)
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {key: values, f"{key}_scale": biased}, values.float() * scales


def linears(key: str, tensor: torch.Tensor) -> bool:
    return ".layers." in key and tensor.ndim == 2 and not key.startswith("vision_tower")


def latent_linears(key: str, tensor: torch.Tensor) -> bool:
    names = ("w1", "w2", "w3", "wkv", "wq_a", "wq_b", "wo_b")
    return linears(key, tensor) and key.split(".")[-2] in names and ".compressor." not in key


def linears_and_experts(key: str, tensor: torch.Tensor) -> bool:
    return ".layers." in key and tensor.ndim > 1 and not key.endswith(".gate.weight")


def experts(key: str, tensor: torch.Tensor) -> bool:
    return ".experts." in key and tensor.ndim == 3


class Published(NamedTuple):
    """How a class is published in FP8: the format, the quantized tensors, and the settings."""

    form: Callable[[str, torch.Tensor], Form]
    quantized: Callable[[str, torch.Tensor], bool]
    settings: dict[str, Any]


STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
EXPONENTS = {"activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
PUBLISHED = {
    "Ministral3ForCausalLM": Published(static_scheme, linears, STATIC),
    "Mistral3ForConditionalGeneration": Published(static_scheme, linears, STATIC),
    "Mistral4ForCausalLM": Published(mistral_experts, linears_and_experts, STATIC),
    "DeepseekV4ForCausalLM": Published(
        e8m0_and_fp4, latent_linears, {"quant_method": "fp8", **EXPONENTS, "weight_block_size": [128, 128]}
    ),
    "Inkling2ForCausalLM": Published(
        groups_of_32, experts, {"quant_method": "fp8", **EXPONENTS, "weight_block_size": [1, GROUP]}
    ),
    "Inkling2ForConditionalGeneration": Published(
        groups_of_32, experts, {"quant_method": "mxfp8", **EXPONENTS, "weight_block_size": [1, GROUP]}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("architecture", PUBLISHED)
def test_fp8_of_published_classes_is_exact(architecture: str, tmp_path: Path) -> None:
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"needs {unmet}")
    form, quantized, settings = PUBLISHED[architecture]
    FamilyCase(registry.model_class(architecture)).reference().save_pretrained(tmp_path / "fp8")
    expected = stored(tmp_path / "fp8")
    keys = [key for key, tensor in expected.items() if quantized(key, tensor)]
    assert keys

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key in keys:
            parts, expected[key] = form(key, tensors.pop(key))
            tensors.update({name: part.contiguous() for name, part in parts.items()})

    edit_weights(tmp_path / "fp8", quantize)
    edit_config(tmp_path / "fp8", quantization_config=settings)
    auto = "AutoModelForImageTextToText" if "Conditional" in architecture else "AutoModelForCausalLM"
    model = getattr(nrl_models, auto).from_pretrained(tmp_path / "fp8", dtype=torch.float32)
    assert_same(dict(model.state_dict_adapter.iter_export(model)), expected)
    model.save_pretrained(tmp_path / "saved")
    assert_same(stored(tmp_path / "saved"), expected)
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
