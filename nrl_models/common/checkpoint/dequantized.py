"""Dequantize checkpoints on load: FP8 in its published forms, and MXFP4 (gpt-oss).

| form of FP8 | values | scales | published as |
|---|---|---|---|
| blocks | `weight` | `weight_scale_inv` | DeepSeek-V3, Qwen3, MiniMax |
| one scale per tensor | `weight` | `weight_scale_inv`; `activation_scale` is dropped | Ministral 3, Devstral 2 |
| E8M0 scales, experts in FP4 | `weight`, FP4 pairs in int8 | `scale` | DeepSeek-V4 |
| Mistral's names | `weight` | `qscale_weight`; `qscale_act` is dropped | Mistral Large 4 |
| exponents in uint8 | `weight` | `weight_scale_inv` | Inkling 2 |
| vLLM's names | `weight` | `weight_scale`; `input_scale` is dropped | vLLM, ModelOpt |

Dequantization is the only operation on checkpoint tensors that is not a view. It is applied first, by a reader: keys,
shapes and dtypes are those of the dequantized checkpoint, and values are computed when a tensor is read. So matching,
stacking of experts and sharding work as for unquantized checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from transformers import PreTrainedConfig

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.upstream import text_part
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown

METHODS = ("fp8", "mxfp4")
"""Names in transformers of the supported methods. It reads `mxfp8` as `fp8`."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4_PAIRS = torch.int8
"""Dtype of pairs of FP4 codes in FP8 checkpoints with scales. The first code is in the lower half of the byte."""

DEFAULT_BLOCK = (128, 128)
"""Rows and columns of FP8 blocks where the configuration has no size: transformers' default for quantization."""

BLOCKS, SCALES = "_blocks", "_scales"

UNPAIRED = ("_scale_inv", ".qscale_weight")
"""Suffixes of tensors that can only be scales of an FP8 tensor."""

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
"""Suffixes of scales with which engines quantize the key-value cache; no weight depends on them."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes of FP4 (e2m1) (OCP microscaling formats, version 1.0)."""


def settings_of(quantized_as: Any) -> dict[str, Any]:
    """Return a quantization's settings from transformers' object or from the dictionary in `config.json`.

    Raises:
        CheckpointError: If it is neither.
    """
    if not isinstance(quantized_as, Mapping) and not hasattr(quantized_as, "to_dict"):
        problem = Problem(ProblemKind.CONFIG, "quantization_config", f"is {shown(quantized_as)}, expected an object")
        raise CheckpointError("cannot load a quantized checkpoint", [problem], ["correct it, or leave it out"])
    return dict(quantized_as) if isinstance(quantized_as, Mapping) else quantized_as.to_dict()


def quantized_part(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration that has a `quantization_config`: `config`, or as in transformers its text part."""
    parts = (config, text_part(config, decoder=True))
    return next((part for part in parts if getattr(part, "quantization_config", None) is not None), None)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized tensor, which is stored as two tensors.

    Args:
        values: FP8 numbers, or pairs of FP4 codes: `(..., rows, columns / 2)`; for MXFP4 `(..., rows, groups, 16)`.
        scales: One scale per block, or per group of 32.
        block: Rows and columns of a block; None for a single scale; () for MXFP4.
    """

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, ...] | None


class DequantizedFiles(CheckpointFiles):
    """Tensors of a quantized checkpoint by key, dequantized on read.

    FP8: `weight` and its scales are read as `weight` in fp32; activation scales are dropped. MXFP4:
    `gate_up_proj_blocks` and `gate_up_proj_scales` are read as `gate_up_proj` in bf16, which is exact, with the last
    two dimensions swapped as in the model.

    Args:
        folder: See `CheckpointFiles`.
        quantized_as: The configuration's `quantization_config`.
        variant: See `CheckpointFiles`.

    Raises:
        CheckpointError: See `CheckpointFiles`. Also if values lack scales or scales lack values, their numbers do not
            match, or a dtype is not quantized. Lists all problems.
    """

    def __init__(self, folder: str | Path, quantized_as: Any, variant: str | None = None) -> None:
        super().__init__(folder, variant)
        self._quantized: dict[str, Quantized] = {}
        method = settings_of(quantized_as)["quant_method"]
        problems = self._pair_mxfp4() if method == "mxfp4" else self._pair_fp8(settings_of(quantized_as))
        if problems:
            self.close()
            raise CheckpointError(
                f"cannot load {self.folder}, which is quantized with {method}",
                problems,
                ["tensors are missing, or quantization_config is of another checkpoint: download or save it again"],
            )
        self.dequantized = frozenset(self._quantized)

    def stored_parts(self, tensor: StoredTensor) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor] | None]:
        """Return stored values and scales, and the function to dequantize them. See `CheckpointFiles.stored_parts`."""
        quantized = self._quantized.get(tensor.key)
        if quantized is None:
            return super().stored_parts(tensor)
        stored = self.read_stored(quantized.values), self.read_stored(quantized.scales)
        return stored, from_mxfp4 if quantized.block == () else partial(from_fp8, block=quantized.block)

    def _pair_fp8(self, settings: Mapping[str, Any]) -> list[Problem]:
        block, problems = _block_of(settings.get("weight_block_size"))
        if problems:
            return problems
        for key in [key for key, tensor in self.tensors.items() if key.endswith(CACHE_SCALES) and tensor.numel == 1]:
            del self.tensors[key]
        for key, values in list(self.tensors.items()):
            is_fp4 = values.dtype == FP4_PAIRS
            if not is_fp4 and values.dtype not in FP8:
                continue
            names = _scale_names(key)
            stored_names = [name for name in names if name in self.tensors]
            if is_fp4 and not stored_names:  # regular integers
                continue
            for name in _activation_scale_names(key):
                self.tensors.pop(name, None)
            if not stored_names:
                detail = f"is missing, and so is {', '.join(names[1:])}, but {key} is FP8"
                problems.append(Problem(ProblemKind.MISSING, names[0], detail, values.file))
                continue
            scales = self.tensors.pop(stored_names[0])
            shape = (*values.shape[:-1], 2 * values.shape[-1]) if is_fp4 else values.shape
            tensor_block, expected = _block_for(shape, scales.shape, None if is_fp4 else block)
            if expected:
                problems.append(scales.problem(ProblemKind.SHAPE, f"has shape {scales.shape}; {key} {expected}"))
            elif not (scales.dtype.is_floating_point or scales.dtype == torch.uint8):
                detail = f"is {scales.dtype}; expected floats, or exponents in uint8"
                problems.append(scales.problem(ProblemKind.DTYPE, detail))
            self._quantized[key] = Quantized(values, scales, tensor_block)
            self.tensors[key] = replace(values, dtype=torch.float32, shape=shape)
        left = [tensor for key, tensor in self.tensors.items() if key.endswith(UNPAIRED)]
        return problems + [tensor.problem(ProblemKind.UNEXPECTED, "scales no FP8 tensor") for tensor in left]

    def _pair_mxfp4(self) -> list[Problem]:
        problems = []
        for key, values in list(self.tensors.items()):
            if not key.endswith(BLOCKS):
                continue
            name = key.removesuffix(BLOCKS)
            del self.tensors[key]
            scales = self.tensors.pop(f"{name}{SCALES}", None)
            if scales is None:
                detail = f"is missing, but {key} exists"
                problems.append(Problem(ProblemKind.MISSING, f"{name}{SCALES}", detail, values.file))
                continue
            if (values.dtype, scales.dtype) != (torch.uint8, torch.uint8):
                detail = f"is {values.dtype} with scales of {scales.dtype}; both are bytes in MXFP4"
                problems.append(values.problem(ProblemKind.DTYPE, detail))
            if len(values.shape) < 3 or values.shape[-1] != 16 or scales.shape != values.shape[:-1]:
                detail = f"has shape {scales.shape}; {key} of shape {values.shape} needs {values.shape[:-1]}"
                problems.append(scales.problem(ProblemKind.SHAPE, detail))
                continue
            if name in self.tensors:
                problems.append(Problem(ProblemKind.DUPLICATED, name, f"exists in addition to {key}", values.file))
            *stack, rows, groups, _ = values.shape
            self._quantized[name] = Quantized(values, scales, ())
            self.tensors[name] = StoredTensor(name, values.file, (*stack, groups * 32, rows), torch.bfloat16, 0)
        left = [tensor for key, tensor in self.tensors.items() if key.endswith(SCALES) and tensor.dtype == torch.uint8]
        return problems + [tensor.problem(ProblemKind.UNEXPECTED, "scales no MXFP4 blocks") for tensor in left]


def from_fp8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...] | None) -> torch.Tensor:
    """Multiply FP8 or FP4 values by the scales of their blocks.

    Args:
        values: FP8 `(..., rows, columns)`, or pairs of FP4 codes in int8 `(..., rows, columns / 2)`.
        scales: One per block, `(..., block_rows, block_columns)`, or one per index of the first dimension. Floating
            point, or exponents of two in uint8 with a bias of 127.
        block: Rows and columns of a block; None for a single scale of the tensor.

    Returns:
        fp32 `(..., rows, columns)`.
    """
    result = _from_pairs(values.view(torch.uint8)) if values.dtype == FP4_PAIRS else values.to(torch.float32)
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    scales = scales.to(torch.float32)
    if block is None:
        return result.mul_(scales.reshape(()))
    if scales.ndim == 1:
        scales = scales.view(-1, *[1] * (result.ndim - 1))
    rows, columns = result.shape[-2:]
    scales = scales.repeat_interleave(block[1], dim=-1)[..., :columns]
    return result.mul_(scales.repeat_interleave(block[0], dim=-2)[..., :rows, :])


def _from_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Return the FP4 numbers of two codes per byte, the first in the lower half: fp32, twice as many columns."""
    codes = torch.tensor(FP4_VALUES, dtype=torch.float32)
    return torch.stack([codes[(pairs & 15).int()], codes[(pairs >> 4).int()]], dim=-1).flatten(-2)


def from_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4 to bf16, which is exact.

    Args:
        values: Pairs of codes, the first in the lower half of a byte, `(..., rows, groups, 16)`.
        scales: Exponents of two with a bias of 127, `(..., rows, groups)`.

    Returns:
        `(..., groups * 32, rows)`, with the last two dimensions swapped, as in transformers' experts.
    """
    numbers = torch.ldexp(_from_pairs(values), scales.int()[..., None] - 127).to(torch.bfloat16)
    return rearrange(numbers, "... rows groups values -> ... (groups values) rows").contiguous()


def _scale_names(key: str) -> list[str]:
    """Return the names under which the scales of a tensor may be stored."""
    names = [f"{key}_scale_inv", f"{key}_scale"]
    if key.endswith(".weight"):
        names += [key.removesuffix("weight") + name for name in ("scale", "qscale_weight")]
    return names


def _activation_scale_names(key: str) -> list[str]:
    """Return the names of a linear's activation scales, which its weight does not depend on."""
    names = [f"{key}_activation_scale", f"{key}_input_scale"]
    if key.endswith(".weight"):
        names += [key.removesuffix("weight") + name for name in ("activation_scale", "input_scale", "qscale_act")]
    return names


def _block_for(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, ...] | None
) -> tuple[tuple[int, ...] | None, str]:
    """Find the block size of a tensor from the shape of its scales.

    Args:
        shape: Shape of the tensor.
        scales: Shape of its scales.
        block: Block size in the configuration; the last block of a row or column may be smaller. None accepts
            `DEFAULT_BLOCK`, or any size that divides the tensor. If both are possible, it is `DEFAULT_BLOCK`: two
            scales of 192 rows belong to 128 and 64 rows.

    Returns:
        The block size (None for a single scale), and the expected shape of the scales (empty if they match).
    """
    if scales in ((), (1,)) or (block is None and math.prod(scales) == 1):
        return None, ""
    if len(shape) < 2:
        return None, f"of shape {shape} needs a single scale"
    if block is not None:
        counts = _block_counts(shape, block)
        return block, "" if scales == counts else f"of shape {shape} in blocks of {block} needs {counts}"
    rows, columns = shape[-2:]
    if scales == shape[:1]:
        return (rows if len(shape) > 2 else 1, columns), ""
    if scales == _block_counts(shape, DEFAULT_BLOCK):
        return DEFAULT_BLOCK, ""
    if len(scales) != len(shape) or scales[:-2] != shape[:-2] or rows % scales[-2] or columns % scales[-1]:
        return None, f"of shape {shape} is not divided by them"
    return (rows // scales[-2], columns // scales[-1]), ""


def _block_of(size: Any) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """Return rows and columns of a block from `weight_block_size` (None: one scale per tensor), and problems."""
    if size is None:
        return None, []
    if (
        isinstance(size, (list, tuple))
        and len(size) == 2
        and all(type(number) is int and number > 0 for number in size)
    ):
        return tuple(size), []
    detail = f"is {shown(size)}, expected the rows and columns of a block, such as [128, 128], or null"
    return None, [Problem(ProblemKind.CONFIG, "quantization_config.weight_block_size", detail)]


def _block_counts(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    *stack, rows, columns = shape
    return (*stack, -(-rows // block[0]), -(-columns // block[1]))
