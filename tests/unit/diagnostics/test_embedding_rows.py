"""Detection of untrained rows in embeddings that resemble trained ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nrl_models.diagnostics.embedding_rows import (
    IDENTICAL,
    NEAR_ZERO,
    SMALLEST_CLUSTER,
    UntrainedRows,
    statistics,
    untrained_rows,
)

VOCABULARY, HIDDEN = 8_000, 96
FALSE_ALARMS = 0.001


@pytest.fixture(scope="module")
def trained() -> torch.Tensor:
    """Return rows like trained ones: a common mean, few strong directions, topics, norms within a factor of five."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    strength = torch.linspace(1.0, 0.1, HIDDEN)
    topics = normal(80, HIDDEN)[torch.randint(80, (VOCABULARY,), generator=generator)]
    rows = (normal(VOCABULARY, HIDDEN) + topics) * strength
    norms = (0.3 * normal(VOCABULARY)).clamp(-0.8, 0.8).exp()
    return (rows * norms[:, None] + normal(HIDDEN)).bfloat16()


def find(weight: torch.Tensor) -> UntrainedRows:
    return untrained_rows(weight, statistics(weight), near_zero=NEAR_ZERO, identical=IDENTICAL)


def test_trained_rows_are_not_reported(trained: torch.Tensor) -> None:
    assert len(find(trained).all) <= FALSE_ALARMS * VOCABULARY


def zero(rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(rows)


def near_zero(rows: torch.Tensor) -> torch.Tensor:
    """Rows left small by weight decay, far above the guide's threshold of 1e-10."""
    return rows * 1e-3


def constant(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, :1] + 1e-3 * rows


def at_the_mean(rows: torch.Tensor) -> torch.Tensor:
    """Rows as `resize_token_embeddings` initializes new tokens."""
    return rows.mean(0) + 1e-3 * rows


def pairs(rows: torch.Tensor) -> torch.Tensor:
    return rows[: len(rows) // 2].repeat(2, 1)


def one_direction(rows: torch.Tensor) -> torch.Tensor:
    """Rows moved only by the gradient that all tokens share."""
    noise = rows - rows.mean(0)
    common = 3 * noise[0]
    return rows.mean(0) + common + 0.2 * common.norm() * torch.nn.functional.normalize(noise)


PLANTED: dict[Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]] = {
    zero: ("near_zero", "identical", "flat"),
    near_zero: ("flat",),
    constant: ("flat",),
    at_the_mean: ("at_mean",),
    pairs: ("duplicates",),
    one_direction: ("clusters",),
}
"""Planted rows, and the kinds of untrained rows that apply to all of them."""


@pytest.mark.long
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_rows_are_found_with_few_false_alarms(
    trained: torch.Tensor, plant: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    rows = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))[: 4 * SMALLEST_CLUSTER]
    weight = trained.clone()
    centered = trained[rows].float() - trained[rows].float().mean(0) + trained.float().mean(0)
    weight[rows] = plant(centered).bfloat16()
    detected, expected = find(weight), set(rows.tolist())
    for kind in PLANTED[plant]:
        listed = getattr(detected, kind)
        assert expected <= set(torch.tensor(listed).flatten().tolist()), kind
    assert len(set(detected.all) - expected) <= FALSE_ALARMS * VOCABULARY


def test_row_is_reported_under_one_kind(trained: torch.Tensor) -> None:
    """Rows of zeros are also identical to each other. Duplicates also have the same direction."""
    weight = trained.clone()
    weight[10:20] = 0.0
    weight[30:34] = trained[30]
    detected = find(weight)
    assert detected.duplicates == [[30, 31, 32, 33]]
    assert not detected.clusters
    assert set(detected.all) >= {*range(10, 20), *range(30, 34)}


def test_duplicate_groups_are_separate(trained: torch.Tensor) -> None:
    weight = trained.clone()
    weight[[1, 9]] = trained[5]
    weight[8] = trained[2]
    assert find(weight).duplicates == [[1, 5, 9], [2, 8]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_rows_do_not_hide_others(trained: torch.Tensor, value: float) -> None:
    weight = trained.clone()
    weight[[5, 7], 3] = value
    weight[9] *= 1e-3
    weight[11] = weight[10]
    detected = find(weight)
    assert detected.not_finite == [5, 7]
    assert set(detected.degenerate) >= {5, 7, 9}
    assert detected.duplicates == [[10, 11]]
    assert len(set(detected.all) - {5, 7, 9, 10, 11}) <= FALSE_ALARMS * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_small_vocabulary_in_any_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[2] = weight[0]
    detected = find(weight)
    assert detected.duplicates == [[0, 2]]
    assert detected.all == [0, 2]
