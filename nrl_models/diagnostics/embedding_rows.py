"""Find rows of an embedding that were never trained, from the rows alone.

Checkpoints rarely have rows of exact zeros. Rows of tokens that pretraining never saw have other properties: they are
much smaller than all others, close to the mean of all rows, bitwise equal to each other, or have the same direction,
because they only received the gradient that all tokens share. All measures are relative to the other rows of the same
embedding.

Rows are read in blocks, so memory is bounded for any vocabulary size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch

from nrl_models.common.dtypes import dtype_name

ROWS_AT_A_TIME = 8192

NEAR_ZERO = 1e-10
IDENTICAL = 1e-8
"""The guide's thresholds: for the largest absolute value of a row, and for its standard deviation."""

SMALL = 0.05
"""A row is flat if its deviation is below this fraction of the median. It is at the mean if its distance from the mean
is. In SmolLM2, Gemma 3 and MiniLM, all trained rows are above 0.2."""

SAME_DIRECTION = 0.9
"""Minimum cosine between rows of a cluster and its center, after subtracting the mean of all rows. At 0.85, the most
frequent tokens of SmolLM2 would also form a cluster."""

SMALLEST_CLUSTER, MOST_CLUSTERS = 16, 16
SAMPLED_ROWS, SAMPLED_DIMENSIONS = 8192, 256


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of each row of an embedding in fp64, `(vocab_size,)` each.

    Args:
        largest: Largest absolute value.
        deviation: Standard deviation of the values.
        absolute, total, squares: Sums of absolute values, of values and of squares.
        mean: Mean of all finite rows, `(hidden_size,)`.
    """

    largest: torch.Tensor
    deviation: torch.Tensor
    absolute: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True, slots=True)
class UntrainedRows:
    """Untrained rows of an embedding, by symptom. A row may have several.

    Args:
        not_finite: A value is NaN or infinite. Such rows are in no other list.
        near_zero: All values are below the guide's threshold.
        identical: The standard deviation of the values is below the guide's threshold.
        flat: The standard deviation is a small fraction of the median row's.
        at_mean: The row is close to the mean of all rows, like rows of new tokens.
        duplicates: Groups of bitwise equal rows, largest first, without rows of the kinds above.
        clusters: Groups of rows with the same direction, largest first, without rows of the kinds above except
            duplicates.
        padding: Row of the padding token if it is zero, as initialized by transformers. It is in no other list.
    """

    not_finite: list[int]
    near_zero: list[int]
    identical: list[int]
    flat: list[int]
    at_mean: list[int]
    duplicates: list[list[int]]
    clusters: list[list[int]]
    padding: int | None = None

    @property
    def degenerate(self) -> list[int]:
        """Rows without information: not finite, near zero, constant, flat, or at the mean."""
        return sorted({*self.not_finite, *self.near_zero, *self.identical, *self.flat, *self.at_mean})

    @property
    def all(self) -> list[int]:
        """All untrained rows."""
        return sorted({*self.degenerate, *chain.from_iterable(self.duplicates), *chain.from_iterable(self.clusters)})


def untrained_rows(
    weight: torch.Tensor, row_stats: RowStatistics, *, near_zero: float, identical: float, padding: int | None = None
) -> UntrainedRows:
    """Find the untrained rows of `weight`, `(vocab_size, hidden_size)`.

    Args:
        weight: The embedding.
        row_stats: Statistics of the rows.
        near_zero, identical: Thresholds of the guide.
        padding: Row that may be zero.
    """
    if padding is not None and not (padding < len(weight) and row_stats.largest[padding] == 0):
        padding = None
    broken = ~row_stats.largest.isfinite()
    zero, constant = row_stats.largest < near_zero, row_stats.deviation < identical
    flat = row_stats.deviation < SMALL * row_stats.deviation.nanmedian()
    mean = at_the_mean(weight, row_stats.mean)
    for mask in (zero, constant, flat, mean):
        if padding is not None:
            mask[padding] = False
    degenerate = broken | zero | constant | flat | mean
    if padding is not None:
        degenerate[padding] = True
    return UntrainedRows(
        not_finite=broken.nonzero()[:, 0].tolist(),
        near_zero=zero.nonzero()[:, 0].tolist(),
        identical=constant.nonzero()[:, 0].tolist(),
        flat=flat.nonzero()[:, 0].tolist(),
        at_mean=mean.nonzero()[:, 0].tolist(),
        duplicates=duplicates(weight, degenerate),
        clusters=clusters(weight, row_stats.mean, degenerate),
        padding=padding,
    )


@dataclass(frozen=True, slots=True)
class EmbeddingSummary:
    """Statistics of the rows of one embedding.

    Args:
        kind: `Input` or `Output`.
        key: Name of the tensor in the files.
        shape, dtype: Shape and dtype of the tensor.
        untrained: The untrained rows.
        mean_abs, max_abs: Mean and maximum of all absolute values.
        std_range: Smallest and largest standard deviation of a row.
        healthy_std: Standard deviation over the values of all other rows; 0 if there are none.
        copies: Further keys under which the files have the tensor, because it is tied.
    """

    kind: str
    key: str
    shape: tuple[int, int]
    dtype: torch.dtype
    untrained: UntrainedRows
    mean_abs: float
    max_abs: float
    std_range: tuple[float, float]
    healthy_std: float
    copies: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the untrained rows on the same level."""
        values = asdict(self)
        return values | values.pop("untrained") | {"kind": self.kind.lower(), "dtype": dtype_name(self.dtype)}


def summarize(
    kind: str,
    key: str,
    weight: torch.Tensor,
    *,
    near_zero: float = NEAR_ZERO,
    identical: float = IDENTICAL,
    padding: int | None = None,
) -> EmbeddingSummary:
    """Find the untrained rows of `weight`, `(vocab_size, hidden_size)`. The row `padding` may be zero."""
    row_stats = statistics(weight)
    untrained = untrained_rows(weight, row_stats, near_zero=near_zero, identical=identical, padding=padding)
    healthy = torch.ones(len(weight), dtype=torch.bool)
    healthy[[*untrained.all, *([] if untrained.padding is None else [untrained.padding])]] = False
    count = max(int(healthy.sum()) * weight.shape[1], 1)
    variance = row_stats.squares[healthy].sum() / count - (row_stats.total[healthy].sum() / count) ** 2
    return EmbeddingSummary(
        kind=kind,
        key=key,
        shape=(weight.shape[0], weight.shape[1]),
        dtype=weight.dtype,
        untrained=untrained,
        mean_abs=row_stats.absolute.sum().item() / max(weight.numel(), 1),
        max_abs=row_stats.largest.max().item(),
        std_range=(row_stats.deviation.min().item(), row_stats.deviation.max().item()),
        healthy_std=max(variance.item(), 0.0) ** 0.5,
    )


def blocks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield blocks of rows of `weight` in fp32, each with the index of its first row."""
    for first in range(0, len(weight), ROWS_AT_A_TIME):
        yield first, weight[first : first + ROWS_AT_A_TIME].float()


def statistics(weight: torch.Tensor) -> RowStatistics:
    """Compute the statistics of `weight`, `(vocab_size, hidden_size)`."""
    block_stats, column_sums, summed = [], torch.zeros(weight.shape[1], dtype=torch.float64), 0
    for _, rows in blocks(weight):
        # Sum in fp64, because fp32 sums of squares lose small deviations.
        sums = [(rows.abs()).sum(1, dtype=torch.float64), rows.sum(1, dtype=torch.float64)]
        squares = rows.square().sum(1, dtype=torch.float64)
        largest = rows.abs().amax(1)
        block_stats.append(torch.stack([largest.double(), rows.std(dim=1, correction=0).double(), *sums, squares]))
        finite = largest.isfinite()
        healthy = rows if finite.all() else rows[finite]
        column_sums += healthy.sum(0, dtype=torch.float64)
        summed += len(healthy)
    largest, deviation, absolute, total, sums_of_squares = torch.cat(block_stats, dim=1)
    mean = column_sums / max(summed, 1)
    return RowStatistics(largest, deviation, absolute, total, sums_of_squares, mean)


def duplicates(weight: torch.Tensor, skipped: torch.Tensor) -> list[list[int]]:
    """Find groups of bitwise equal rows, largest first, without the rows in mask `skipped`."""
    alike: dict[bytes, list[int]] = defaultdict(list)
    for first in range(0, len(weight), ROWS_AT_A_TIME):
        rows = weight[first : first + ROWS_AT_A_TIME].contiguous().view(torch.uint8).numpy()
        for index, row in enumerate(rows, start=first):
            alike[blake2b(row, digest_size=16).digest()].append(index)
    groups = [group for group in alike.values() if len(group) > 1 and not skipped[group[0]]]
    return sorted(groups, key=len, reverse=True)


def at_the_mean(weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows close to the mean (relative to the median distance), like rows of new tokens."""
    center = mean.float()
    distances = torch.cat([(rows - center).norm(dim=1) for _, rows in blocks(weight)])
    return distances < SMALL * distances.nanmedian()


def clusters(weight: torch.Tensor, mean: torch.Tensor, skipped: torch.Tensor) -> list[list[int]]:
    """Find groups of rows with the same direction from the mean, largest first, without the rows in mask `skipped`.

    Centers are searched among some thousands of rows, in fewer dimensions. Then all rows are compared with each center,
    twice, because the rows found in the first pass give a better center.
    """
    centers = _centers(weight, mean, skipped)
    nearest = torch.full((len(weight),), -1)
    for _ in range(2):
        sums = torch.zeros_like(centers)
        if not len(centers):
            break
        for first, rows in blocks(weight):
            directions = torch.nn.functional.normalize(rows - mean.float())
            cosine, which = (directions @ centers.T).max(1)
            outside = (cosine < SAME_DIRECTION) | skipped[first : first + len(rows)]
            nearest[first : first + len(rows)] = torch.where(outside, -1, which)
            sums.index_add_(0, which[~outside], directions[~outside])
        centers = torch.nn.functional.normalize(sums)
    groups = [(nearest == index).nonzero()[:, 0].tolist() for index in range(len(centers))]
    return sorted((group for group in groups if len(group) >= SMALLEST_CLUSTER), key=len, reverse=True)


def _centers(weight: torch.Tensor, mean: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Find directions that several sampled rows share. Returns unit vectors, `(count, hidden_size)`."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(weight), generator=generator)
    sample = order[~skipped[order]][:SAMPLED_ROWS].sort().values
    hidden = weight.shape[1]
    dimensions = min(hidden, SAMPLED_DIMENSIONS)
    projection = torch.randn(hidden, dimensions, generator=generator) if dimensions < hidden else torch.eye(hidden)
    parts = [weight[part].float() - mean.float() for part in sample.split(ROWS_AT_A_TIME)]
    low = torch.nn.functional.normalize(torch.cat([part @ projection for part in parts]))
    # Projected cosines are off by some hundredths. Two rows of a cluster may have the square of its bound.
    bound = SAME_DIRECTION**2 - 0.1
    neighbors = torch.cat([(part @ low.T > bound).sum(1) for part in low.split(1024)])
    centers: list[torch.Tensor] = []
    left = torch.ones(len(sample), dtype=torch.bool)
    fewest = max(2, SMALLEST_CLUSTER * len(sample) // max(len(weight), 1) // 2)
    while len(centers) < MOST_CLUSTERS and left.any():
        peak = torch.where(left, neighbors, 0).argmax()
        near = (low @ low[peak] > bound) & left
        if near.sum() < fewest:
            break
        members = torch.nn.functional.normalize(weight[sample[near]].float() - mean.float())
        centers.append(torch.nn.functional.normalize(members.mean(0), dim=0))
        left &= ~near
    return torch.stack(centers) if centers else torch.zeros(0, hidden)
