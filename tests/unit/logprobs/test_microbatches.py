"""Grouping sequences into microbatches."""

from __future__ import annotations

import random

import pytest

from nrl_models.logprobs.microbatches import Microbatch, RowLayout, fewest, levelled, size


def make_units(lengths: list[int]) -> list[Microbatch]:
    return [Microbatch.of([number], lengths) for number in range(len(lengths))]


def sequence_numbers(found: list[Microbatch]) -> list[tuple[int, ...]]:
    return [row.numbers for row in found]


def test_longest_sequences_are_placed_first() -> None:
    """In the original order, 6 and 4 would share a row, and the others would need two more."""
    units = make_units([4, 6, 3, 7])
    assert sequence_numbers(fewest(units, RowLayout.PACKED, 10)) == [(3, 2), (1, 0)]
    assert sequence_numbers(fewest(units, RowLayout.PADDED, 14)) == [(3, 1), (0, 2)]
    assert sequence_numbers(fewest(units, RowLayout.ALONE, 10)) == [(3,), (1,), (0,), (2,)]


def test_padding_counts_toward_budget() -> None:
    units = make_units([9, 2, 2, 2, 2])
    assert sequence_numbers(fewest(units, RowLayout.PADDED, 10)) == [(0,), (1, 2, 3, 4)]
    assert sequence_numbers(fewest(units, RowLayout.PADDED, 18)) == [(0, 1), (2, 3, 4)]


def test_units_are_not_split() -> None:
    lengths = [5, 1, 1, 5, 3]
    units = [Microbatch.of(pair, lengths) for pair in ([0, 1], [2, 3], [4])]
    assert sequence_numbers(fewest(units, RowLayout.PACKED, 9)) == [(0, 1, 4), (2, 3)]
    assert sequence_numbers(fewest(units, RowLayout.PADDED, 10)) == [(0, 1), (2, 3), (4,)]


def test_levelled_rows_have_similar_lengths() -> None:
    """First fit leaves the last row almost empty. Ranks that wait for each other can use that row for free."""
    units = make_units([8, 7, 6, 2, 1])
    assert [row.tokens for row in fewest(units, RowLayout.PACKED, 10)] == [10, 8, 6]
    assert [row.tokens for row in levelled(units, RowLayout.PACKED, 10, 3)] == [8, 8, 8]
    assert [row.tokens for row in levelled(units, RowLayout.PACKED, 10, 4)] == [8, 7, 6, 3]
    assert len(levelled(units, RowLayout.PACKED, 10, 9)) == 5, "rows are not empty"
    assert levelled([], RowLayout.PACKED, 10, 3) == []


def test_levelled_rows_stay_within_budget() -> None:
    """Placing into the emptier of two rows gives 5, 4, then 3, 3, 3: ten tokens, where first fit needs nine."""
    units = make_units([5, 4, 3, 3, 3])
    assert [row.tokens for row in levelled(units, RowLayout.PACKED, 9, 2)] == [9, 9]


@pytest.mark.parametrize("layout", RowLayout)
def test_every_sequence_is_placed_once(layout: RowLayout) -> None:
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.randint(1, 50) for _ in range(draw.randint(1, 40))]
        units, budget = make_units(lengths), draw.randint(50, 150)
        rows = fewest(units, layout, budget)
        for found in (rows, levelled(units, layout, budget, len(rows) + draw.randint(0, 3))):
            assert sorted(number for row in found for number in row.numbers) == list(range(len(lengths)))
            assert max(size(layout, row) for row in found) <= budget
            assert [size(layout, row) for row in found] == sorted((size(layout, row) for row in found), reverse=True)
        if layout is RowLayout.PACKED:  # first-fit decreasing, https://doi.org/10.1016/0304-3975(73)90013-9
            assert len(rows) <= 11 / 9 * -(-sum(lengths) // budget) + 2
