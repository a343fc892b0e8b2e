"""Tensors of a checkpoint that a model keeps beside its own, because it does not compute with them.

They are no parameters: no optimiser, freezing, `.to(device)` or FSDP sees them. Their values stay pages of the
checkpoint's files, on the CPU, also where they are stored quantised, and are read when they are saved or exported.
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


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is kept as it is stored.

    Args:
        spec: its shape, and the dtype in which it is saved and exported.
        stored: over the files' pages: the values alone, or what they are computed from. Never written to.
        compute: makes the values of what is stored; None where that is the values.
        is_mtp: whether it is a weight of multi-token prediction, which engines take, too.
    """

    spec: TensorSpec
    stored: tuple[torch.Tensor, ...]
    compute: Callable[..., torch.Tensor] | None = None
    is_mtp: bool = False

    def read(self) -> torch.Tensor:
        """The values, on the CPU: the pages themselves, or computed again at each call."""
        if self.compute is None:
            return self.stored[0]
        return self.compute(*self.stored).to(self.spec.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> KeptTensor:
        return self  # immutable


def kept_by(model: nn.Module, *, mtp_only: bool = False) -> Mapping[str, KeptTensor]:
    """What a model keeps, by the checkpoint's names, in their order there."""
    kept: Mapping[str, KeptTensor] = getattr(model, "_kept_tensors", {})
    return {name: tensor for name, tensor in kept.items() if tensor.is_mtp} if mtp_only else kept


def keeps_unused(model: nn.Module) -> re.Pattern[str]:
    """Matches names of a checkpoint's tensors that a family's model keeps (`FamilyModel.keeps_unused`)."""
    return re.compile("|".join(getattr(model, "keeps_unused", ())) or r"(?!)")


def keep(model: nn.Module, tensors: Mapping[str, KeptTensor]) -> None:
    """Have a model keep `tensors`, beside what it keeps."""
    if tensors:
        cast(Any, model)._kept_tensors = {**kept_by(model), **tensors}


def kept_from(
    files: CheckpointFiles, keys: Iterable[str], dtype: torch.dtype | None, *, is_mtp: bool = False
) -> dict[str, KeptTensor]:
    """Tensors of a checkpoint, to be kept.

    Args:
        files: the checkpoint, which may be closed afterwards.
        keys: of the tensors.
        dtype: what dequantised tensors are given in; others have the dtype they are stored in.
        is_mtp: see `KeptTensor`.
    """
    kept = {}
    for key in keys:
        tensor = files.tensors[key]
        stored, compute = files.stored_parts(tensor)
        own = tensor.dtype if compute is None or dtype is None else dtype
        kept[key] = KeptTensor(TensorSpec(tensor.shape, own), stored, compute, is_mtp)
    return kept
