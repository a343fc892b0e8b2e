"""The sweep over all architectures detects faults, and survives an architecture that crashes its processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import faults
from world import RanksLostError, World

from nrl_models import registry
from tests.distributed import sweep
from tools.coverage_pages.results import Kind
from tools.coverage_pages.sharding_outcomes import ShardingOutcome, Status

LARGE_SUMS = "Gemma4ForConditionalGeneration#E2B"


@pytest.fixture(scope="module")
def ranks() -> Iterator[sweep.Ranks]:
    ranks = sweep.Ranks()
    yield ranks
    ranks.close()


def test_moe_architecture_runs_every_kind(ranks: sweep.Ranks, tmp_path: Path) -> None:
    outcomes = ranks.try_sharding("MixtralForCausalLM", str(tmp_path))
    assert {Kind.FSDP, Kind.TP, Kind.EP, Kind.COMPILED} <= outcomes.keys()
    assert set(outcomes.values()) == {ShardingOutcome(Status.AGREES)}


def test_indivisible_model_status_and_reason(ranks: sweep.Ranks) -> None:
    outcome = ranks.run(faults.refuses)
    assert outcome.status == Status.REFUSED
    assert "has 3 heads" in outcome.reason
    assert ranks.world is not None, "the processes are still running"


def test_wrong_weights_losses_and_gradients_are_detected(ranks: sweep.Ranks) -> None:
    lines, _ = ranks.run(faults.differs)
    assert lines == [
        ["exported weights are not those of the checkpoint: lm_head.weight"],
        ["exports other tensors: lm_head.weight"],
        "gradients",
        "loss, gradients",
        "gradients",
    ]


@pytest.mark.skipif(bool(registry.unmet_requirement(LARGE_SUMS)), reason="needs a newer transformers")
def test_rounding_of_one_process_is_no_difference(ranks: sweep.Ranks) -> None:
    """Gradients of this embedding are sums of large numbers, so two summation orders differ by more than the bound."""
    name = "model.language_model.embed_tokens.weight"
    messages, _ = ranks.run(faults.differs_by_more_than_rounding, LARGE_SUMS, name)
    assert messages == ["", "gradients"]


def test_sweep_continues_after_rank_crash(ranks: sweep.Ranks) -> None:
    ended = ranks.run(faults.ends)
    assert ended == ShardingOutcome(Status.ERROR, "ranks ended, with exit status: {1: 3}; others: nothing")
    assert ranks.run(faults.raises) == ShardingOutcome(Status.ERROR, "KeyError: 'lost'")
    assert ranks.world is None, "the world is replaced, because ranks may be out of step"
    assert ranks.run(dist.get_rank) == [0, 1]


def test_hanging_job_times_out() -> None:
    world = World(2)
    world.run(faults.hangs, 0)  # imports done
    with pytest.raises(RanksLostError, match=r"ranks \[1\] hang"):
        world.run(faults.hangs, 600, patience=4)
    assert not world.alive
