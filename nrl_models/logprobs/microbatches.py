"""Group a batch's sequences into microbatches: few forward passes within a token budget, equally many on each rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nrl_models.common.documents.layers import DecoderByDocument
from nrl_models.common.documents.packing_checks import unmasked_attention
from nrl_models.common.modules import innermost, reads_complete_rows

ROW_TOKENS_OF_CPU, ROW_TOKENS_OF_GPU = 1024, 8192
"""Default tokens per microbatch, enough to keep the device busy. More would take memory without saving time."""
SHARED_ROW_TOKENS_OF_CPU = 2048
"""Default tokens of sequences that share a prompt on a CPU: longer rows compute the prompt less often."""


class RowLayout(StrEnum):
    """How a microbatch stores its sequences."""

    PACKED = "packed"
    """Concatenated into one row."""
    PADDED = "padded"
    """One row per sequence, padded on the right."""
    ALONE = "alone"
    """A single sequence."""


def layout_of(*models: nn.Module) -> RowLayout:
    """Return the cheapest layout that all of the models support.

    This library's classes keep documents in one row apart, except those with an entry in `limits`. Packing saves
    nothing for models that run each document through the decoder separately. Some adapters around a model read
    complete rows.
    """
    inner = [innermost(model) for model in models]
    limits = {limit for model in inner for limit in getattr(model, "limits", {})}
    if "right padding" in limits:
        return RowLayout.ALONE
    apart = all(getattr(type(model).forward, "keeps_documents_apart", False) for model in inner)
    together = not any(isinstance(module, DecoderByDocument) for model in inner for module in model.modules())
    masked = not any(unmasked_attention(model.config) for model in inner)
    packs = apart and together and masked and "packed sequences" not in limits
    packs = packs and not any(map(reads_complete_rows, models))
    return RowLayout.PACKED if packs else RowLayout.PADDED


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences that run together.

    Attributes:
        numbers: Indices of the sequences.
        tokens: Total number of tokens.
        longest: Number of tokens of the longest sequence.
        shared: For each sequence, the number of leading tokens that are computed in an earlier sequence: the last one
            before it with 0 here.
    """

    numbers: tuple[int, ...] = ()
    tokens: int = 0
    longest: int = 0
    shared: tuple[int, ...] = ()

    @classmethod
    def of(cls, numbers: Sequence[int], lengths: Sequence[int]) -> Microbatch:
        """Create a microbatch of the sequences `numbers`. `lengths` are those of all sequences."""
        sizes = [lengths[number] for number in numbers]
        return cls(tuple(numbers), sum(sizes), max(sizes, default=0), (0,) * len(sizes))

    @classmethod
    def sharing(cls, numbers: Sequence[int], lengths: Sequence[int], shared: int) -> Microbatch:
        """Create a microbatch of the sequences `numbers`, whose first `shared` tokens are equal and computed once."""
        separate = cls.of(numbers, lengths)
        repeats = (0, *[shared] * (len(numbers) - 1))
        return cls(separate.numbers, separate.tokens - sum(repeats), separate.longest, repeats)

    def __add__(self, other: Microbatch) -> Microbatch:
        """Return a microbatch with the sequences of both."""
        tokens, longest = self.tokens + other.tokens, max(self.longest, other.longest)
        return Microbatch(self.numbers + other.numbers, tokens, longest, self.shared + other.shared)


def size(layout: RowLayout, *parts: Microbatch) -> int:
    """Return the number of tokens to compute for these microbatches together, including padding."""
    if layout is RowLayout.PACKED:
        return sum(part.tokens for part in parts)
    return sum(len(part.numbers) for part in parts) * max(part.longest for part in parts)


def fewest(units: Sequence[Microbatch], layout: RowLayout, row_tokens: int) -> list[Microbatch]:
    """Pack units into few microbatches of at most `row_tokens` tokens (first-fit decreasing), largest first.

    Args:
        units: Sequences that must be in one microbatch.
        layout: Layout of a microbatch.
        row_tokens: Maximum number of tokens of a microbatch, including padding. No unit may exceed it.
    """
    microbatches: list[Microbatch] = []
    for unit in _longest_first(units, layout):
        for index, row in enumerate(microbatches) if layout is not RowLayout.ALONE else ():
            if size(layout, row, unit) <= row_tokens:
                microbatches[index] = row + unit
                break
        else:
            microbatches.append(unit)
    return sorted(microbatches, key=lambda row: -size(layout, row))


def levelled(units: Sequence[Microbatch], layout: RowLayout, row_tokens: int, count: int) -> list[Microbatch]:
    """Pack units into at most `count` microbatches of similar size. `count` must be at least that of `fewest`.

    Each unit, from the longest, goes into the row with the fewest tokens. Falls back to `fewest` if a row exceeds the
    budget, and for padded rows, because padding is cheap for sequences of similar lengths.
    """
    fewest_microbatches = fewest(units, layout, row_tokens)
    if layout is not RowLayout.PACKED or not units:
        return fewest_microbatches
    emptiest = [(0, index, Microbatch()) for index in range(min(count, len(units)))]
    for unit in _longest_first(units, layout):
        _, index, row = emptiest[0]
        heapq.heapreplace(emptiest, (row.tokens + unit.tokens, index, row + unit))
    level = sorted((row for _, _, row in emptiest), key=lambda row: -row.tokens)
    return level if level[0].tokens <= row_tokens else fewest_microbatches


def _longest_first(units: Sequence[Microbatch], layout: RowLayout) -> list[Microbatch]:
    return sorted(units, key=lambda unit: -(unit.tokens if layout is RowLayout.PACKED else unit.longest))


def ranks_of(group: Any) -> int:
    """Return the number of ranks of a process group (default: all); 1 if torch.distributed is not initialized."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def largest(numbers: Sequence[int], group: Any, device: torch.device) -> list[int]:
    """Return the element-wise maximum of `numbers` over the ranks of a group."""
    if ranks_of(group) == 1:
        return list(numbers)
    maximum = torch.tensor(numbers, device=device)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
    return maximum.tolist()
