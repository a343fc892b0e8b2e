"""`rollout_logprobs` under FSDP2: all ranks run the same number of forward passes, and sum up to one process."""

from __future__ import annotations

import pytest
from jobs import rollout_ranks
from world import RanksFailedError, World

from nrl_models.losses import Normalize

UNEVEN = (30, 12, 25, 7, 18, 9), (5, 1)
"""Lengths of two ranks. With rows of 32 tokens the first rank has four rows, and the second can fill two."""


@pytest.mark.parametrize("normalize", Normalize)
@pytest.mark.parametrize("together", [False, True], ids=["by-token", "together"])
def test_ranks_with_different_numbers_of_sequences(two: World, normalize: Normalize, together: bool) -> None:
    """If a loss depends on all sequences of a rank, the numbers of second passes are also equal on all ranks."""
    results = two.run(rollout_ranks.equals_one_process, "LlamaForCausalLM", UNEVEN, normalize, together, 32)
    for rank in results:
        assert rank["loss"] < 1e-5
        assert rank["gradients"] < 3e-5
    assert {rank["passes"] for rank in results} == {7 if together else 4}, "the last row needs no second pass"


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "ElectraForCausalLM"], ids=["packed", "padded"])
def test_rank_without_sequences(two: World, architecture: str) -> None:
    lengths = (30, 12, 25, 7), ()
    results = two.run(rollout_ranks.equals_one_process, architecture, lengths, Normalize.TOKEN, False, 32)
    for rank in results:
        assert rank["loss"] < 1e-5
        assert rank["gradients"] < 3e-5
    assert len({rank["passes"] for rank in results}) == 1


def test_logprobs_without_loss(two: World) -> None:
    assert two.run(rollout_ranks.compares_logprobs, "LlamaForCausalLM", UNEVEN) == [4, 4]


@pytest.mark.parametrize("reshards", [False, True])
def test_gradients_with_single_fsdp_unit(two: World, reshards: bool) -> None:
    """No inner layer starts FSDP's part of the backward, which would never reduce the gradients."""
    assert max(two.run(rollout_ranks.single_fsdp_unit, reshards)) < 3e-5


def test_rank_error_raises_on_every_rank(two: World) -> None:
    """No rank hangs."""
    with pytest.raises(RanksFailedError) as raised:
        two.run(rollout_ranks.runs_invalid_sequences, ((3, 4), (0, 5, 33)))
    kinds, texts = zip(*(raised.value.errors[rank] for rank in range(2)), strict=True)
    assert kinds == ("ValueError", "ValueError")
    assert texts[0] == "another rank has sequences with 2 problems: see its error"
    assert texts[1] == "sequence 0 is empty; sequence 2 has 33 tokens, and row_tokens allows 32"
