"""Numbers in the state of an optimizer, with their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nrl_models.common.checkpoint.stored_tensors import DTYPES
from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.distributed.shards import full_of

_PYTHON_TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float)}
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values() if not dtype.is_complex}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number in the state of an optimizer, as JSON stores it.

    Args:
        type: `bool`, `int` or `float` for a Python number, or the dtype of a tensor: `torch.float32`.
        value: The number.
    """

    type: str
    value: Any

    @staticmethod
    def of(value: float | torch.Tensor) -> Scalar:
        """Return a number or a 0-dimensional tensor with its type. Subclasses of Python's types become Python's."""
        if isinstance(value, torch.Tensor):
            return Scalar(str(value.dtype), full_of(value).item())
        name, kind = next((name, kind) for name, kind in _PYTHON_TYPES.items() if isinstance(value, kind))
        return Scalar(name, kind(value))

    @property
    def is_valid(self) -> bool:
        """Whether the type exists and can hold the value."""
        if (dtype := _DTYPES.get(self.type)) is None:
            is_its_type = type(self.value) is _PYTHON_TYPES.get(self.type)
            return is_its_type and (isinstance(self.value, bool) or is_number(self.value))
        if dtype == torch.bool:
            return isinstance(self.value, bool)
        if dtype.is_floating_point:
            return is_number(self.value)
        limits = torch.iinfo(dtype)
        return is_integer(self.value, limits.min, limits.max)

    def restored(self, device: torch.device) -> bool | float | torch.Tensor:
        """Return the number in its type, a tensor on `device`."""
        dtype = _DTYPES.get(self.type)
        return self.value if dtype is None else torch.tensor(self.value, dtype=dtype, device=device)
