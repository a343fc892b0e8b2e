"""Exact changes between two versions of the weights: positions and values of elements, or complete tensors.

Elements are compared and copied as bits, which preserves NaN, the sign of zero and every dtype. A position is sent as a
16-bit distance from the previous position. If the distance is too long, unchanged elements in between are also sent. In
bf16 a changed element takes 4 bytes: if 1% of the weights changed, the delta has 2% of their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.errors import EngineError, shown

FARTHEST = 2**16 - 1
"""Maximum distance in elements from one position to the next."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_WHOLE, _STEPS, _VALUES = "whole/", "steps/", "values/"
"""Beginnings of the keys of a message, followed by a tensor's name: a complete tensor, or distances and values."""


class DeltaWriter:
    """Collect changes into one message.

    Attributes:
        nbytes: Size of the collected changes.
        tensors: The message.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Add the differences of two tensors with equal shape and dtype. Returns True if there are any.

        Changed values are copied, so no reference to `new` is kept.
        """
        before, now = _bits(old), _bits(new)
        changed = before != now
        count, size_of_one = int(changed.count_nonzero()), 2 + now.itemsize
        if not count:
            return False
        if count * size_of_one < now.nbytes:  # otherwise, sending positions saves nothing
            steps = _steps(changed.nonzero().flatten())
            if (size := len(steps) * size_of_one) < now.nbytes:
                self.tensors[_STEPS + name] = steps.to(torch.uint16)
                self.tensors[_VALUES + name] = now[steps.cumsum(0) - 1]
                self.nbytes += size
                return True
        self.tensors[_WHOLE + name] = new.detach().clone(memory_format=torch.contiguous_format)
        self.nbytes += now.nbytes
        return True


def patched(old: Mapping[str, torch.Tensor], message: Mapping[str, torch.Tensor]) -> Iterator[NamedTensor]:
    """Yield the tensors that a message changes, with the changes. `old` is not modified.

    Args:
        old: Tensors of the message's base version, by name.
        message: `DeltaWriter.tensors`.

    Raises:
        EngineError: If the message does not fit `old`, or is damaged.
    """
    for key, tensor in message.items():
        if key.startswith(_WHOLE):
            name = key.removeprefix(_WHOLE)
            before = old.get(name)
            if before is None or (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
                raise _damaged(f"it has a complete {shown(name)} that is not in the last weights, or of another shape")
            yield name, tensor
        elif key.startswith(_STEPS):
            name = key.removeprefix(_STEPS)
            before, values = old.get(name), message.get(_VALUES + name)
            places = tensor.to(torch.int64).cumsum(0) - 1
            if (
                before is None
                or values is None
                or (tensor.dim(), tensor.shape) != (1, values.shape)
                or not len(places)
                or (tensor.dtype, values.dtype) != (torch.uint16, _BITS[before.element_size()])
                or not (int(places[0]) >= 0 and int(places[-1]) < before.numel())
            ):
                raise _damaged(f"its changes of {shown(name)} do not fit the last weights")
            new = before.detach().clone(memory_format=torch.contiguous_format)
            _bits(new)[places] = values
            yield name, new


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements on the CPU as flat integers of the same size: a view if possible."""
    value = tensor.detach().cpu().contiguous().reshape(-1)
    return value.view(_BITS[value.element_size()])


def _steps(places: torch.Tensor) -> torch.Tensor:
    """Return distances between positions, starting before the tensor. Inserts positions if a distance is too large."""
    steps = places.diff(prepend=places.new_tensor([-1]))
    extra = (steps - 1) // FARTHEST
    if not extra.any():
        return steps
    result = steps.new_full((len(steps) + int(extra.sum()),), FARTHEST)
    result[(extra + 1).cumsum(0) - 1] = steps - extra * FARTHEST
    return result


def _damaged(reason: str) -> EngineError:
    return EngineError(f"a delta of the weights cannot be applied: {reason}. Send all weights")
