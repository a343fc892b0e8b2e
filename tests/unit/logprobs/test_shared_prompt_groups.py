"""Sequences that share a prompt: groups that compute the fewest tokens, and documents that continue others."""

from __future__ import annotations

import pytest
import torch

from nrl_models.common.documents.boundaries import Documents, sharing_prompts
from nrl_models.logprobs.shared_prompts import units_with_shared_prompts


def test_groups_save_the_most_tokens() -> None:
    first, second, third = (torch.arange(start, start + 30) for start in (0, 100, 200))
    share_prefix = torch.cat([torch.full((10,), 7), first]), torch.cat([torch.full((10,), 7), second])
    ids = [share_prefix[0], share_prefix[1], torch.cat([share_prefix[0], third]), third]
    units = units_with_shared_prompts(ids, [torch.zeros(len(row)).bool() for row in ids], 200)
    result = {frozenset(unit.numbers): (unit.tokens, sorted(unit.shared)) for unit in units}
    assert result == {frozenset({0, 2}): (70, [0, 40]), frozenset({1}): (40, [0]), frozenset({3}): (30, [0])}


def test_groups_fit_the_budget_and_have_equal_scores() -> None:
    ids = [torch.cat([torch.arange(20), torch.full((5,), 100 + number)]) for number in range(6)]
    scores = [torch.arange(25) >= 20 for _ in ids]
    units = units_with_shared_prompts(ids, scores, 35)
    assert [unit.tokens for unit in units] == [35, 35]
    assert [unit.tokens for unit in units_with_shared_prompts(ids, scores, 10)] == [25] * 6
    scores[0] = torch.arange(25) >= 3
    assert sorted(unit.tokens for unit in units_with_shared_prompts(ids, scores, 100)) == [25, 45]


def test_positions_without_prompt_document_raise() -> None:
    with sharing_prompts():
        for positions in ([[0, 1, 2, 5, 6]], [[2, 3, 0, 1]], [[0, 1, 2, 1, 2], [0, 1, 2, 3, 4]]):
            with pytest.raises(ValueError, match=r"no such document|must be in one row"):
                Documents.from_positions(torch.tensor(positions))
        result = Documents.from_positions(torch.tensor([[0, 1, 2, 3, 2, 3, 4, 0, 1]]))
        assert result.lengths_with_prompts == [4, 5, 2]
        assert result.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1]]
        chunks = result.chunked(2)
        assert chunks.prompts is None
        assert result.chunked(3).lengths_with_prompts == [3, 1, 3, 2, 2]


def test_identical_sequences_run_once() -> None:
    (unit,) = units_with_shared_prompts([torch.arange(20)] * 3, [torch.ones(20).bool()] * 3, 100)
    assert (unit.tokens, unit.shared) == (20, (0, 20, 20))
