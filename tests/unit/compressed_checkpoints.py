"""Write compressed-tensors checkpoints without the package. Unquantized weights are computed in closed form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import edit_config, new_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

Parts = dict[str, torch.Tensor]
Stored = tuple[Parts, torch.Tensor]
"""Tensors of one weight by the last part of their names, and the unquantized weight."""

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def drawn(weight: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Draw random integers that depend only on the weight."""
    generator = torch.Generator().manual_seed(int(weight.abs().sum() * 1e4) % 2**31)
    return torch.randint(low, high, weight.shape, generator=generator)


def scales_of(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Return one scale per group of columns, in fp32 with few digits."""
    return (weight.abs().unflatten(1, (columns, -1)).amax(-1) + 0.1).bfloat16().float()


def fp8(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448.0
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def fp8_per_tensor(weight: torch.Tensor) -> Stored:
    scale = (weight.abs().max() / 448.0).reshape(1)
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def fp8_in_blocks(weight: torch.Tensor) -> Stored:
    """Quantize in blocks of 48 x 32. The last block may have fewer rows."""
    rows, columns = -(-weight.shape[0] // 48), weight.shape[1] // 32
    scale = 0.01 * (1 + torch.arange(rows * columns).reshape(rows, columns))
    plain = scale.repeat_interleave(48, 0)[: weight.shape[0]].repeat_interleave(32, 1)
    values = (weight / plain).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * plain


def mxfp8(weight: torch.Tensor) -> Stored:
    values, exponents = weight.to(torch.float8_e4m3fn), drawn(weight[:, ::32], 120, 130)
    plain = values.float() * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)
    return {"weight": values, "weight_scale": exponents.to(torch.uint8)}, plain


def int8(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127.0
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def int8_with_zero_points(weight: torch.Tensor) -> Stored:
    parts, _ = int8(weight)
    zeros = drawn(parts["weight_scale"], -20, 20).to(torch.int8)
    return parts | {"weight_zero_point": zeros}, (parts["weight"].float() - zeros) * parts["weight_scale"]


def in_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned numbers into rows of int32, starting at the lowest bits."""
    offsets = torch.arange(0, 32, bits)
    words = (numbers.long().unflatten(1, (-1, 32 // bits)) << offsets).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def packed(weight: torch.Tensor, groups: int, bits: int = 4) -> Stored:
    half = 2 ** (bits - 1)
    numbers, scale = drawn(weight, -half, half), scales_of(weight, groups)
    stored = {"weight_packed": in_words(numbers + half, bits), "weight_scale": scale}
    plain = numbers * scale.repeat_interleave(weight.shape[1] // groups, 1)
    return stored | {"weight_shape": torch.tensor(weight.shape)}, plain


def int4(weight: torch.Tensor) -> Stored:
    return packed(weight, weight.shape[1] // 32)


def int4_per_channel(weight: torch.Tensor) -> Stored:
    return packed(weight, 1)


def int8_packed(weight: torch.Tensor) -> Stored:
    return packed(weight, weight.shape[1] // 32, bits=8)


def int4_with_zero_points(weight: torch.Tensor) -> Stored:
    parts, plain = int4(weight)
    scale = parts["weight_scale"]
    zeros = drawn(scale, -8, 8)
    stored = parts | {"weight_zero_point": in_words(zeros.T + 8, 4).T.contiguous()}
    return stored, plain - (zeros * scale).repeat_interleave(32, 1)


def nvfp4(weight: torch.Tensor) -> Stored:
    codes = drawn(weight, 0, 16)
    scale = scales_of(weight, weight.shape[1] // 16).to(torch.float8_e4m3fn)
    stored = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": scale}
    plain = FP4[codes] * scale.float().repeat_interleave(16, 1) / 8.0
    return stored | {"weight_global_scale": torch.tensor([8.0])}, plain


def mxfp4(weight: torch.Tensor) -> Stored:
    codes, exponents = drawn(weight, 0, 16), drawn(weight[:, ::32], 120, 130)
    stored = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    plain = FP4[codes] * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)
    return stored | {"weight_scale": exponents.to(torch.uint8)}, plain


FORMS: dict[str, tuple[str, dict[str, Any], Callable[[torch.Tensor], Stored]]] = {
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, fp8),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, fp8_per_tensor),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 32]},
        fp8_in_blocks,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        mxfp8,
    ),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, int8),
    "int8-zeros": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        int8_with_zero_points,
    ),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, int4),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, int4_per_channel),
    "int4-zeros": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        int4_with_zero_points,
    ),
    "int8-packed": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32},
        int8_packed,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        nvfp4,
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, mxfp4),
}


def group(form: str, targets: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Return an entry of `config_groups`."""
    weights = {"symmetric": True, "dynamic": False} | FORMS[form][1]
    return {"targets": targets or ["Linear"], "weights": weights, **more}


QUANTIZED = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Ends of the names of quantized weights."""


def write(
    folder: Path,
    config: PreTrainedConfig,
    form: str,
    experts: str | None = None,
    targets: list[str] | None = None,
) -> Parts:
    """Write a random model with quantized linears, optionally with experts in another format. Returns the weights.

    Args:
        folder: Folder of the checkpoint.
        config: The model's configuration. One with a vision tower gets a vision-language model.
        form: Key in `FORMS`.
        experts: Key in `FORMS` of the experts.
        targets: Linears in the format `form`; all by default.
    """
    new_model(
        config, "ForConditionalGeneration" if "vision_config" in config.sub_configs else "ForCausalLM"
    ).save_pretrained(folder)
    stored: Parts = {}
    plain: Parts = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith(QUANTIZED):
            parts, plain[name] = FORMS[experts if experts and ".experts." in name else form][2](tensor)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
        if name.endswith("k_proj.weight"):
            stored |= {name.replace("k_proj.weight", part): torch.ones(1) for part in ("k_scale", "k_zero_point")}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    groups = {"group_0": group(form, targets)}
    if experts:
        groups["group_1"] = group(experts, ["re:.*mlp.experts.*"], format=FORMS[experts][0])
    settings = {
        "quant_method": "compressed-tensors",
        "format": FORMS[form][0],
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }
    edit_config(folder, quantization_config=settings)
    return plain
