"""Checkpoint tensors that a model keeps without computing with them.

They are not parameters, so optimizers, freezing, `.to(device)` and FSDP ignore them. Their values stay memory-mapped
in the checkpoint's files, possibly quantized. They are read on the CPU when the model is saved or exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.errors import Problem, ProblemKind, StateDictError


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A kept tensor in its stored form.

    Args:
        spec: Shape of the tensor, and the dtype in which it is saved and exported.
        stored: Memory-mapped tensors with the values, or the inputs from which they are computed. Never written to.
        compute: Function that computes the values from `stored`. None if `stored` has the values.
        is_mtp: Whether it is a weight of multi-token prediction. Engines also receive these.
    """

    spec: TensorSpec
    stored: tuple[torch.Tensor, ...]
    compute: Callable[..., torch.Tensor] | None = None
    is_mtp: bool = False

    def read(self) -> torch.Tensor:
        """Return the values on the CPU: the mapped tensor, or newly computed values."""
        if self.compute is None:
            return self.stored[0]
        return self.compute(*self.stored).to(self.spec.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> KeptTensor:
        return self  # immutable

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle stored tensors of one byte per value (FP8) as integers, because torch cannot unpickle FP8."""
        stored = [
            (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor, tensor.dtype) for tensor in self.stored
        ]
        return _unpickled, (self.spec, stored, self.compute, self.is_mtp)


def _unpickled(
    spec: TensorSpec,
    stored: Iterable[tuple[torch.Tensor, torch.dtype]],
    compute: Callable[..., torch.Tensor] | None,
    is_mtp: bool,
) -> KeptTensor:
    return KeptTensor(spec, tuple(tensor.view(dtype) for tensor, dtype in stored), compute, is_mtp)


def kept_by(model: nn.Module, *, mtp_only: bool = False) -> Mapping[str, KeptTensor]:
    """Return the tensors that a model keeps, by the checkpoint's names and in its order."""
    kept_tensors: Mapping[str, KeptTensor] = getattr(model, "_kept_tensors", {})
    return {name: tensor for name, tensor in kept_tensors.items() if tensor.is_mtp} if mtp_only else kept_tensors


def keeps_unused(model: nn.Module) -> re.Pattern[str]:
    """Return a pattern of the checkpoint tensors that a family's model keeps (`FamilyModel.keeps_unused`)."""
    return re.compile("|".join(getattr(model, "keeps_unused", ())) or r"(?!)")


def kept_as(model: nn.Module, specs: Mapping[str, TensorSpec]) -> Mapping[str, KeptTensor]:
    """Return the tensors that a model keeps.

    Raises:
        StateDictError: If a tensor of `specs` is missing, or differs in shape or dtype.
    """
    kept_tensors = kept_by(model)
    if gone := [name for name, spec in specs.items() if name not in kept_tensors or kept_tensors[name].spec != spec]:
        problems = [Problem(ProblemKind.MISSING, name, "is no longer kept by the model") for name in gone]
        raise StateDictError("the model is not the one this adapter was made for", problems)
    return kept_tensors


def keep(model: nn.Module, tensors: Mapping[str, KeptTensor]) -> None:
    """Add `tensors` to the tensors that a model keeps."""
    if tensors:
        cast(Any, model)._kept_tensors = {**kept_by(model), **tensors}


def kept_from(
    files: CheckpointFiles, keys: Iterable[str], dtype: torch.dtype | None, *, is_mtp: bool = False
) -> dict[str, KeptTensor]:
    """Create kept tensors from a checkpoint.

    Args:
        files: The checkpoint. It may be closed afterwards.
        keys: Keys of the tensors.
        dtype: Dtype of dequantized tensors. Other tensors keep their stored dtype.
        is_mtp: See `KeptTensor`.
    """
    kept_tensors = {}
    for key in keys:
        tensor = files.tensors[key]
        stored, compute = files.stored_parts(tensor)
        spec_dtype = tensor.dtype if compute is None or dtype is None else dtype
        kept_tensors[key] = KeptTensor(TensorSpec(tensor.shape, spec_dtype), stored, compute, is_mtp)
    return kept_tensors


def kept_specs(model: nn.Module) -> dict[str, TensorSpec]:
    """Return shape and dtype of the MTP weights that a model keeps."""
    return {name: tensor.spec for name, tensor in kept_by(model, mtp_only=True).items()}
