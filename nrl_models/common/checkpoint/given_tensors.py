"""Read a state dict through the same interface as a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nrl_models.common.checkpoint.files import CheckpointFiles, Identity
from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.dtypes import unreadable
from nrl_models.common.value_checks import require_names
from nrl_models.errors import UnknownArgumentError, listed

NAME = "state_dict"
"""Name of a state dict in messages, instead of a directory and a file."""


class GivenTensors(CheckpointFiles):
    """The tensors of a state dict. The loaded model gets copies of them.

    Args:
        state_dict: Complete tensors under names of checkpoints or of the model.

    Raises:
        UnknownArgumentError: If it is not a mapping of names to tensors, or tensors are sharded, sparse or on meta.
    """

    is_private = False

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        require_names(state_dict)
        self.folder = Path(NAME)
        self.seen: dict[str, Identity | None] = {}
        if wrong := [key for key, value in state_dict.items() if not _is_complete(value)]:
            raise UnknownArgumentError(
                f"state_dict: {listed(wrong)}: expected complete, dense tensors with values, by name. Gather sharded "
                "tensors first (tensor.full_tensor()), and remove values that are not tensors"
            )
        self._given = {key: value.detach() for key, value in state_dict.items()}
        self.tensors = {
            key: StoredTensor(key, NAME, tuple(tensor.shape), tensor.dtype, 0) for key, tensor in self._given.items()
        }

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor in the state dict's order, as in transformers."""
        dtypes = (tensor.dtype for tensor in self._given.values())
        return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), None)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the tensor in the state dict, without a copy."""
        return self._given[tensor.key]

    def stored_parts(self, tensor: StoredTensor) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor] | None]:
        """Return a copy of the tensor."""
        return (self.read(tensor).clone(),), None

    def read_joined(self, tensors: Sequence[StoredTensor], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return None: tensors of a state dict do not share pages."""
        return None

    def close(self) -> None:
        """Drop the reference to the state dict."""
        self._given = {}


def _is_complete(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return not unreadable(value)
