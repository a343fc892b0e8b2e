"""Which sequences of a batch run together: few forward passes under a budget of tokens, and as many on each rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nrl_models.common.forward.layer_by_document import DecoderByDocument

ROW_TOKENS_OF_CPU, ROW_TOKENS_OF_GPU = 1024, 8192
"""Tokens of a microbatch by default: about as many as keep the device busy. More take memory, and no less time."""


class Layout(StrEnum):
    """How the sequences of a microbatch lie in it."""

    PACKED = "packed"
    """One after the other, in one row."""
    PADDED = "padded"
    """Each in a row of its own, padded on the right."""
    ALONE = "alone"
    """There is only one."""


def layout_of(*models: nn.Module) -> Layout:
    """The layout that all of some models compute right, and that costs least.

    Documents in one row stay apart in our classes, but in those that say no in their `limits`. Where each goes through
    the decoder by itself, nothing is gained by it.
    """
    limits = {limit for model in models for limit in getattr(model, "limits", {})}
    if "right padding" in limits:
        return Layout.ALONE
    apart = all(getattr(type(model).forward, "keeps_documents_apart", False) for model in models)
    together = not any(isinstance(module, DecoderByDocument) for model in models for module in model.modules())
    return Layout.PACKED if apart and together and "packed sequences" not in limits else Layout.PADDED


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences that run together, by their numbers.

    Attributes:
        numbers: which.
        tokens: of all of them.
        longest: tokens of the longest.
    """

    numbers: tuple[int, ...] = ()
    tokens: int = 0
    longest: int = 0

    @classmethod
    def of(cls, numbers: Sequence[int], lengths: Sequence[int]) -> Microbatch:
        """Some of the sequences that have these lengths."""
        own = [lengths[number] for number in numbers]
        return cls(tuple(numbers), sum(own), max(own, default=0))

    def __add__(self, other: Microbatch) -> Microbatch:
        """The sequences of both."""
        tokens, longest = self.tokens + other.tokens, max(self.longest, other.longest)
        return Microbatch(self.numbers + other.numbers, tokens, longest)


def size(layout: Layout, *parts: Microbatch) -> int:
    """Tokens to compute where these run together, padding included."""
    if layout is Layout.PACKED:
        return sum(part.tokens for part in parts)
    return sum(len(part.numbers) for part in parts) * max(part.longest for part in parts)


def fewest(units: Sequence[Microbatch], layout: Layout, row_tokens: int) -> list[Microbatch]:
    """Few microbatches of at most `row_tokens` tokens, the largest first: the first that fits, for the longest first.

    Args:
        units: sequences that have to be in one microbatch.
        layout: how they lie in it.
        row_tokens: tokens of a microbatch, padding included; each unit has at most so many.
    """
    found: list[Microbatch] = []
    for unit in _longest_first(units, layout):
        for place, row in enumerate(found) if layout is not Layout.ALONE else ():
            if size(layout, row, unit) <= row_tokens:
                found[place] = row + unit
                break
        else:
            found.append(unit)
    return sorted(found, key=lambda row: -size(layout, row))


def levelled(units: Sequence[Microbatch], layout: Layout, row_tokens: int, count: int) -> list[Microbatch]:
    """The same in at most `count` microbatches, which are at least as many as the fewest: packed rows of like lengths.

    Each unit, the longest first, goes into the emptiest row. Where that exceeds the budget, and where rows are padded,
    which is cheap for sequences of like lengths, it is the fewest again.
    """
    found = fewest(units, layout, row_tokens)
    if layout is not Layout.PACKED or not units:
        return found
    emptiest = [(0, place, Microbatch()) for place in range(min(count, len(units)))]
    for unit in _longest_first(units, layout):
        _, place, row = emptiest[0]
        heapq.heapreplace(emptiest, (row.tokens + unit.tokens, place, row + unit))
    level = sorted((row for _, _, row in emptiest), key=lambda row: -row.tokens)
    return level if level[0].tokens <= row_tokens else found


def _longest_first(units: Sequence[Microbatch], layout: Layout) -> list[Microbatch]:
    return sorted(units, key=lambda unit: -(unit.tokens if layout is Layout.PACKED else unit.longest))


def ranks_of(group: Any) -> int:
    """The ranks of a process group, of all of them by default; 1 where torch.distributed is not initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def largest(numbers: Sequence[int], group: Any, device: torch.device) -> list[int]:
    """The largest of each number over the ranks of a group."""
    if ranks_of(group) == 1:
        return list(numbers)
    found = torch.tensor(numbers, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return found.tolist()
