"""Exact changes between two versions of the weights: positions and values of elements, or complete tensors.

Elements are compared and copied as bits, which preserves NaN, the sign of zero and every dtype. A position is sent as a
16-bit distance from the previous position. If the distance is too long, unchanged elements in between are also sent. In
bf16 a changed element takes 4 bytes: if 1% of the weights changed, the delta has 2% of their size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.errors import EngineError, shown

FARTHEST = 2**16 - 1
"""Maximum distance in elements from one position to the next."""

_SAMPLE = 1024
"""Number of elements that decide whether most of a tensor changed."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_WHOLE, _STEPS, _VALUES, _SPARSE = "whole/", "steps", "values.", "sparse"


class DeltaWriter:
    """Collect changes into one message.

    Attributes:
        nbytes: Size of the collected changes.
        has_references: Whether it refers to tensors passed to `add`, which must keep their values until `message`.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._whole: dict[str, torch.Tensor] = {}
        self._sparse: list[tuple[str, int]] = []
        self._steps: list[torch.Tensor] = []
        self._values: dict[int, list[torch.Tensor]] = {}

    def add(self, name: str, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Add the differences of two tensors with equal shape and dtype. Returns True if there are any.

        Changed elements are copied. If most elements changed, the writer refers to `new` until `message`.
        """
        now = _bits(new)
        steps = _steps_of_changes(_bits(old), now)
        if steps is None:
            self._whole[name] = new.detach()
            self.nbytes += now.nbytes
            return True
        if not len(steps):
            return False
        self._sparse.append((name, len(steps)))
        self._steps.append(steps.to(torch.uint16))
        self._values.setdefault(now.itemsize, []).append(now[steps.cumsum(0) - 1])
        self.nbytes += len(steps) * _bytes_per_change(now)
        return True

    @property
    def has_references(self) -> bool:
        """See the class."""
        return bool(self._whole)

    def message(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the collected changes: tensors, and text metadata."""
        tensors = {_WHOLE + name: tensor for name, tensor in self._whole.items()}
        if self._sparse:
            tensors[_STEPS] = torch.cat(self._steps)
            tensors |= {f"{_VALUES}{size}": torch.cat(parts) for size, parts in self._values.items()}
        return tensors, {_SPARSE: json.dumps(self._sparse)}


def patched(
    old: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], text: Mapping[str, str]
) -> Iterator[NamedTensor]:
    """Yield the tensors that a message changes, with the changes. `old` is not modified.

    Args:
        old: Tensors of the message's base version, by name.
        tensors, text: The message.

    Raises:
        EngineError: If the message does not fit `old`, or is damaged.
    """
    for key, tensor in tensors.items():
        if key.startswith(_WHOLE):
            name = key.removeprefix(_WHOLE)
            before = old.get(name)
            if before is None or (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
                raise _damaged(f"it has a complete {shown(name)} that is not in the last weights, or of another shape")
            yield name, tensor
    steps, start = tensors.get(_STEPS, torch.empty(0)).to(torch.int64), 0
    starts = dict.fromkeys(_BITS, 0)
    for name, count in _listed(text):
        if (before := old.get(name)) is None:
            raise _damaged(f"it changes {shown(name)}, which the last weights have not")
        size = before.element_size()
        values = tensors.get(f"{_VALUES}{size}", torch.empty(0))[starts[size] : starts[size] + count]
        places = steps[start : start + count].cumsum(0) - 1
        start, starts[size] = start + count, starts[size] + count
        if len(places) != count or len(values) != count or values.dtype != _BITS[size]:
            raise _damaged(f"it has too few changes of {shown(name)}")
        if not (int(places[0]) >= 0 and int(places[-1]) < before.numel()):
            raise _damaged(f"it changes elements of {shown(name)} past its end")
        new = before.detach().clone(memory_format=torch.contiguous_format)
        _bits(new)[places] = values
        yield name, new


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements on the CPU as flat integers of the same size: a view if possible."""
    value = tensor.detach().cpu().contiguous().reshape(-1)
    return value.view(_BITS[value.element_size()])


def _bytes_per_change(elements: torch.Tensor) -> int:
    """Return the size of a changed element in a message: its distance and its value."""
    return 2 + elements.itemsize


def _steps_of_changes(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor | None:
    """Return the distances between changed elements; None if sending the complete tensor takes fewer bytes."""
    if _mostly_changed(before, now):
        return None
    changed, size = before != now, _bytes_per_change(now)
    if 0 < now.nbytes <= int(changed.count_nonzero()) * size:
        return None
    steps = _steps(changed.nonzero().flatten())
    return None if 0 < now.nbytes <= len(steps) * size else steps


def _mostly_changed(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Return True if a sample shows that so many elements changed that positions take more bytes than the tensor.

    Comparing all elements of a model takes four times as long as hashing them.
    """
    if len(now) < 64 * _SAMPLE:
        return False
    every = len(now) // _SAMPLE | 1  # odd, so that it is not a multiple of a row
    sample = before[::every] != now[::every]
    return int(sample.count_nonzero()) * _bytes_per_change(now) > 1.1 * len(sample) * now.itemsize


def _steps(places: torch.Tensor) -> torch.Tensor:
    """Return distances between positions, starting before the tensor. Inserts positions if a distance is too large."""
    steps = places.diff(prepend=places.new_tensor([-1]))
    extra = (steps - 1) // FARTHEST
    if not extra.any():
        return steps
    result = steps.new_full((len(steps) + int(extra.sum()),), FARTHEST)
    result[(extra + 1).cumsum(0) - 1] = steps - extra * FARTHEST
    return result


def _listed(text: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the names of tensors with changed elements, each with the number of these elements."""
    try:
        listed: Any = json.loads(text[_SPARSE])
        fits = all(type(name) is str and type(count) is int and count > 0 for name, count in listed)
    except (KeyError, TypeError, ValueError, RecursionError):
        fits = False
    if not fits:
        raise _damaged("it has no list of its changes")
    return [(name, count) for name, count in listed]


def _damaged(reason: str) -> EngineError:
    return EngineError(f"a delta of the weights cannot be applied: {reason}. Send all weights")
