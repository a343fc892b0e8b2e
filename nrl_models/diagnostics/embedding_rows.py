"""Which rows of an embedding were never trained, found from the rows alone.

Real checkpoints hardly have rows of exact zeros. Rows of tokens that pretraining never saw show otherwise: they are far
smaller than all others, lie where the mean of all rows is, are equal to each other bit for bit, or point the same way,
because all that ever moved them is the gradient that every token gets. Every measure here is relative to the other
rows of the same embedding.

Rows are read in blocks: memory is bounded, whatever the vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

import torch

ROWS_AT_A_TIME = 8192

NEAR_ZERO = 1e-10
IDENTICAL = 1e-8
"""The guide's thresholds: on the largest absolute value of a row, and on its standard deviation."""

SMALL = 0.05
"""A row is flat if its deviation is below this share of the median, and at the mean if its distance from the mean is.
In SmolLM2, Gemma 3 and MiniLM no row that was trained is below a fifth."""

SAME_DIRECTION = 0.9
"""Rows of a cluster have at least this cosine with its centre, once the mean of all rows is taken off. At 0.85 the most
frequent words of SmolLM2 are a cluster, too."""

SMALLEST_CLUSTER, MOST_CLUSTERS = 16, 16
SAMPLED_ROWS, SAMPLED_DIMENSIONS = 8192, 256


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Numbers of each row of an embedding, in fp64, each of shape `(vocabulary,)`.

    Args:
        largest: the largest absolute value.
        deviation: standard deviation of the values.
        absolute, total, squares: sums of absolute values, of values and of squares.
        mean: of all rows, `(hidden,)`.
    """

    largest: torch.Tensor
    deviation: torch.Tensor
    absolute: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True, slots=True)
class UntrainedRows:
    """Rows of an embedding that were hardly trained, by how that shows. A row may be in several.

    Args:
        near_zero: all values are below the guide's threshold.
        identical: the standard deviation of the values is below the guide's threshold.
        flat: it is a small share of the median row's.
        at_mean: the row is where the mean of all rows is, as those of new tokens are.
        duplicates: groups of rows that are equal bit for bit, largest first; rows of the kinds above are in none.
        clusters: groups of rows that point the same way, largest first; rows of the kinds above but duplicates are in
            none.
        padding: the padding token's row, if it is zero as transformers leaves it; it is in none of the others.
    """

    near_zero: list[int]
    identical: list[int]
    flat: list[int]
    at_mean: list[int]
    duplicates: list[list[int]]
    clusters: list[list[int]]
    padding: int | None = None

    @property
    def degenerate(self) -> list[int]:
        """Rows without information of their own: near zero, constant, flat, at the mean."""
        return sorted({*self.near_zero, *self.identical, *self.flat, *self.at_mean})

    @property
    def all(self) -> list[int]:
        """Every row in any of them."""
        return sorted({*self.degenerate, *chain.from_iterable(self.duplicates), *chain.from_iterable(self.clusters)})


def untrained_rows(
    weight: torch.Tensor, found: RowStatistics, *, near_zero: float, identical: float, padding: int | None = None
) -> UntrainedRows:
    """The untrained rows of `weight`, `(vocabulary, hidden)`.

    Args:
        weight: the embedding.
        found: its statistics.
        near_zero, identical: the guide's thresholds.
        padding: the row that may be zero.
    """
    if padding is not None and not (padding < len(weight) and found.largest[padding] == 0):
        padding = None
    zero, constant = found.largest < near_zero, found.deviation < identical
    flat = found.deviation < SMALL * found.deviation.median()
    mean = at_the_mean(weight, found.mean)
    for mask in (zero, constant, flat, mean):
        if padding is not None:
            mask[padding] = False
    degenerate = zero | constant | flat | mean
    if padding is not None:
        degenerate[padding] = True
    return UntrainedRows(
        near_zero=zero.nonzero()[:, 0].tolist(),
        identical=constant.nonzero()[:, 0].tolist(),
        flat=flat.nonzero()[:, 0].tolist(),
        at_mean=mean.nonzero()[:, 0].tolist(),
        duplicates=duplicates(weight, degenerate),
        clusters=clusters(weight, found.mean, degenerate),
        padding=padding,
    )


def blocks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of `weight`, some thousands at a time, in fp32, each with the index of its first."""
    for first in range(0, len(weight), ROWS_AT_A_TIME):
        yield first, weight[first : first + ROWS_AT_A_TIME].float()


def statistics(weight: torch.Tensor) -> RowStatistics:
    """The statistics of `weight`, `(vocabulary, hidden)`."""
    found, column_sums = [], torch.zeros(weight.shape[1], dtype=torch.float64)
    for _, rows in blocks(weight):
        # Sums are taken in fp64: squares of a million values lose what a small deviation is made of.
        sums = [(rows.abs()).sum(1, dtype=torch.float64), rows.sum(1, dtype=torch.float64)]
        squares = rows.square().sum(1, dtype=torch.float64)
        found.append(torch.stack([rows.abs().amax(1).double(), rows.std(dim=1, correction=0).double(), *sums, squares]))
        column_sums += rows.sum(0, dtype=torch.float64)
    largest, deviation, absolute, total, sums_of_squares = torch.cat(found, dim=1)
    mean = column_sums / max(len(weight), 1)
    return RowStatistics(largest, deviation, absolute, total, sums_of_squares, mean)


def duplicates(weight: torch.Tensor, skipped: torch.Tensor) -> list[list[int]]:
    """Groups of rows that are equal bit for bit, largest first; `skipped`, a mask of rows, are in none."""
    alike: dict[bytes, list[int]] = defaultdict(list)
    for first in range(0, len(weight), ROWS_AT_A_TIME):
        rows = weight[first : first + ROWS_AT_A_TIME].contiguous().view(torch.uint8).numpy()
        for index, row in enumerate(rows, start=first):
            alike[blake2b(row, digest_size=16).digest()].append(index)
    groups = [group for group in alike.values() if len(group) > 1 and not skipped[group[0]]]
    return sorted(groups, key=len, reverse=True)


def at_the_mean(weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """A mask of the rows whose distance from the mean is a small share of the median: new tokens are put there."""
    centre = mean.float()
    distances = torch.cat([(rows - centre).norm(dim=1) for _, rows in blocks(weight)])
    return distances < SMALL * distances.median()


def clusters(weight: torch.Tensor, mean: torch.Tensor, skipped: torch.Tensor) -> list[list[int]]:
    """Groups of rows that point the same way from the mean, largest first; `skipped`, a mask, are in none.

    Centres are looked for among some thousands of rows, in fewer dimensions; then every row is compared with each
    centre, twice, because the rows that are found give a better centre.
    """
    centres = _centres(weight, mean, skipped)
    nearest = torch.full((len(weight),), -1)
    for _ in range(2):
        sums = torch.zeros_like(centres)
        if not len(centres):
            break
        for first, rows in blocks(weight):
            directions = torch.nn.functional.normalize(rows - mean.float())
            cosine, which = (directions @ centres.T).max(1)
            outside = (cosine < SAME_DIRECTION) | skipped[first : first + len(rows)]
            nearest[first : first + len(rows)] = torch.where(outside, -1, which)
            sums.index_add_(0, which[~outside], directions[~outside])
        centres = torch.nn.functional.normalize(sums)
    groups = [(nearest == index).nonzero()[:, 0].tolist() for index in range(len(centres))]
    return sorted((group for group in groups if len(group) >= SMALLEST_CLUSTER), key=len, reverse=True)


def _centres(weight: torch.Tensor, mean: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Directions, `(count, hidden)`, that several of some sampled rows share."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(weight), generator=generator)
    sample = order[~skipped[order]][:SAMPLED_ROWS].sort().values
    hidden = weight.shape[1]
    dimensions = min(hidden, SAMPLED_DIMENSIONS)
    projection = torch.randn(hidden, dimensions, generator=generator) if dimensions < hidden else torch.eye(hidden)
    parts = [weight[part].float() - mean.float() for part in sample.split(ROWS_AT_A_TIME)]
    low = torch.nn.functional.normalize(torch.cat([part @ projection for part in parts]))
    # In fewer dimensions a cosine is off by some hundredths; two rows of a cluster have the square of its bound.
    bound = SAME_DIRECTION**2 - 0.1
    neighbours = torch.cat([(part @ low.T > bound).sum(1) for part in low.split(1024)])
    found: list[torch.Tensor] = []
    left = torch.ones(len(sample), dtype=torch.bool)
    fewest = max(2, SMALLEST_CLUSTER * len(sample) // max(len(weight), 1) // 2)
    while len(found) < MOST_CLUSTERS and left.any():
        peak = torch.where(left, neighbours, 0).argmax()
        near = (low @ low[peak] > bound) & left
        if near.sum() < fewest:
            break
        members = torch.nn.functional.normalize(weight[sample[near]].float() - mean.float())
        found.append(torch.nn.functional.normalize(members.mean(0), dim=0))
        left &= ~near
    return torch.stack(found) if found else torch.zeros(0, hidden)
