"""Quantised checkpoints read as plain weights: FP8 by blocks (DeepSeek-V3), MXFP4 (gpt-oss).

Dequantisation is the only operation on a checkpoint's tensors that is not a view. Here it is a reader that is applied
first: keys, shapes and dtypes are those of the plain checkpoint, and values are computed when a tensor is read. So
matching, stacking of experts and sharding need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange

from nrl_models.common.checkpoint.files import CheckpointFiles, StoredTensor
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown

METHODS = ("fp8", "mxfp4")
"""What `quantization_config` calls the methods that are read here."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes of FP4 (e2m1) (OCP microscaling formats, version 1.0)."""


def settings_of(quantised_as: Any) -> dict[str, Any]:
    """A quantisation's settings, given as transformers' object or as `config.json` has them.

    Raises:
        CheckpointError: neither of them.
    """
    if not isinstance(quantised_as, Mapping) and not hasattr(quantised_as, "to_dict"):
        problem = Problem(ProblemKind.CONFIG, "quantization_config", f"is {shown(quantised_as)}, expected an object")
        raise CheckpointError("cannot load a quantised checkpoint", [problem], ["correct it, or leave it out"])
    return dict(quantised_as) if isinstance(quantised_as, Mapping) else quantised_as.to_dict()


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor that is stored as two.

    Args:
        values: FP8 numbers, or pairs of FP4 codes `(..., rows, groups, 16)`.
        scales: one for each block, or for each group of 32.
        block: rows and columns of a block of FP8; None if one scale is for the whole; () for MXFP4.
    """

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, ...] | None


class DequantisedFiles(CheckpointFiles):
    """A quantised checkpoint's tensors, by key, as those of the plain checkpoint.

    FP8: `weight` and `weight_scale_inv` are `weight`, in fp32. MXFP4: `gate_up_proj_blocks` and `gate_up_proj_scales`
    are `gate_up_proj`, in bf16, which holds every value exactly, its last two dimensions exchanged as in the model.

    Args:
        folder: see `CheckpointFiles`.
        quantised_as: the configuration's `quantization_config`.
        variant: see `CheckpointFiles`.

    Raises:
        CheckpointError: what `CheckpointFiles` raises; values without scales, scales without values or of another
            number, dtypes that no quantisation has; all of them at once.
    """

    def __init__(self, folder: str | Path, quantised_as: Any, variant: str | None = None) -> None:
        super().__init__(folder, variant)
        self._quantised: dict[str, Quantised] = {}
        method = settings_of(quantised_as)["quant_method"]
        problems = self._pair_mxfp4() if method == "mxfp4" else self._pair_fp8(settings_of(quantised_as))
        if problems:
            self.close()
            raise CheckpointError(
                f"cannot load {self.folder}, which is quantised with {method}",
                problems,
                ["the checkpoint lost tensors, or its quantization_config is of another: download or save it again"],
            )
        self.dequantised = frozenset(self._quantised)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor's values, dequantised if it is quantised: computed again at each call."""
        if tensor.key not in self._quantised:
            return super().read(tensor)
        stored, compute = self.stored_parts(tensor)
        return stored[0] if compute is None else compute(*stored)

    def stored_parts(self, tensor: StoredTensor) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor] | None]:
        """Values and scales of a quantised tensor, and what dequantises them; see `CheckpointFiles.stored_parts`."""
        quantised = self._quantised.get(tensor.key)
        if quantised is None:
            return super().stored_parts(tensor)
        stored = super().read(quantised.values), super().read(quantised.scales)
        return stored, from_mxfp4 if quantised.block == () else partial(from_fp8, block=quantised.block)

    def read_joined(self, tensors: Sequence[StoredTensor], shape: tuple[int, ...]) -> torch.Tensor | None:
        """As `CheckpointFiles.read_joined`; None where something is quantised."""
        if any(tensor.key in self._quantised for tensor in tensors):
            return None
        return super().read_joined(tensors, shape)

    def _pair_fp8(self, settings: Mapping[str, Any]) -> list[Problem]:
        block, problems = _block_of(settings.get("weight_block_size"))
        if problems:
            return problems
        for key, values in list(self.tensors.items()):
            if values.dtype not in FP8:
                continue
            scales = self.tensors.pop(f"{key}{SCALE}", None)
            if scales is None:
                detail = f"is not there, and {key} is FP8"
                problems.append(Problem(ProblemKind.MISSING, f"{key}{SCALE}", detail, values.file))
                continue
            # One scale for the whole, of any shape, or one for each block; the last block of a row may be smaller.
            expected = () if block is None else _block_counts(values.shape, block)
            if scales.shape != expected and not (block is None and scales.numel == 1):
                needed = f"{key} of shape {values.shape} in blocks of {block} needs {expected}"
                problems.append(scales.problem(ProblemKind.SHAPE, f"has shape {scales.shape}; {needed}"))
            elif not scales.dtype.is_floating_point:
                problems.append(scales.problem(ProblemKind.DTYPE, f"is {scales.dtype}, and scales are floats"))
            self._quantised[key] = Quantised(values, scales, block)
            self.tensors[key] = replace(values, dtype=torch.float32)
        left = [tensor for key, tensor in self.tensors.items() if key.endswith(SCALE)]
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
                detail = f"is not there, and {key} is"
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
                problems.append(Problem(ProblemKind.DUPLICATED, name, f"is there beside {key}", values.file))
            *stack, rows, groups, _ = values.shape
            self._quantised[name] = Quantised(values, scales, ())
            self.tensors[name] = StoredTensor(name, values.file, (*stack, groups * 32, rows), torch.bfloat16, 0)
        left = [tensor for key, tensor in self.tensors.items() if key.endswith(SCALES) and tensor.dtype == torch.uint8]
        return problems + [tensor.problem(ProblemKind.UNEXPECTED, "scales no MXFP4 blocks") for tensor in left]


def from_fp8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...] | None) -> torch.Tensor:
    """FP8 `values` `(..., rows, columns)` times the scales of their blocks, in fp32.

    Args:
        values: FP8 of either kind.
        scales: one for each block `(..., blocks down, blocks across)`, of any floating-point dtype.
        block: rows and columns of a block; None if one scale is for the whole.
    """
    result = values.to(torch.float32)
    scales = scales.to(torch.float32)
    if block is None:
        return result.mul_(scales.reshape(()))
    rows, columns = values.shape[-2:]
    scales = scales.repeat_interleave(block[1], dim=-1)[..., :columns]
    return result.mul_(scales.repeat_interleave(block[0], dim=-2)[..., :rows, :])


def from_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 as bf16, exactly.

    Args:
        values: pairs of codes, the first in the lower half of a byte, `(..., rows, groups, 16)`.
        scales: exponents of two, biased by 127, `(..., rows, groups)`.

    Returns:
        `(..., groups * 32, rows)`: its last two dimensions are exchanged, as transformers' experts have them.
    """
    codes = torch.tensor(FP4_VALUES, dtype=torch.float32)
    pairs = torch.stack([codes[(values & 15).int()], codes[(values >> 4).int()]], dim=-1).flatten(-2)
    numbers = torch.ldexp(pairs, scales.int()[..., None] - 127).to(torch.bfloat16)
    return rearrange(numbers, "... rows groups values -> ... (groups values) rows").contiguous()


def _block_of(size: Any) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """Rows and columns of a block as `weight_block_size` has them, None for one scale a tensor; and what is wrong."""
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
    *stack, rows, columns = shape if len(shape) > 1 else (1, *shape)
    return (*stack, -(-rows // block[0]), -(-columns // block[1]))
