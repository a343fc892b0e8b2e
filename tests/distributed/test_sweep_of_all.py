"""The sweep over all architectures detects faults, and survives an architecture that crashes its processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import faults
from world import RanksLostError, World

from tests.distributed import sweep
from tools.coverage_pages.results import Kind
from tools.coverage_pages.sharding_outcomes import ShardingOutcome, Status


@pytest.fixture(scope="module")
def ranks() -> Iterator[sweep.Ranks]:
    ranks = sweep.Ranks()
    yield ranks
    ranks.close()


def test_an_architecture_with_experts_is_tried_in_every_way(ranks: sweep.Ranks, tmp_path: Path) -> None:
    outcomes = ranks.try_sharding("MixtralForCausalLM", str(tmp_path))
    assert {Kind.FSDP, Kind.TP, Kind.EP, Kind.COMPILED} <= outcomes.keys()
    assert set(outcomes.values()) == {ShardingOutcome(Status.AGREES)}


def test_what_cannot_be_divided_is_refused_with_the_reason(ranks: sweep.Ranks) -> None:
    outcome = ranks.run(faults.refuses)
    assert outcome.status == Status.REFUSED
    assert "has 3 heads" in outcome.reason
    assert ranks.world is not None, "the processes go on"


def test_wrong_weights_losses_and_gradients_are_seen(ranks: sweep.Ranks) -> None:
    lines, _ = ranks.run(faults.differs)
    assert lines == [
        ["exported weights are not those of the checkpoint: lm_head.weight"],
        ["exports other tensors: lm_head.weight"],
        "gradients",
        "loss, gradients",
        "gradients",
    ]


def test_the_sweep_goes_on_after_processes_that_end_or_part(ranks: sweep.Ranks) -> None:
    ended = ranks.run(faults.ends)
    assert ended == ShardingOutcome(Status.ERROR, "ranks ended, with exit status: {1: 3}; others: nothing")
    assert ranks.run(faults.raises) == ShardingOutcome(Status.ERROR, "KeyError: 'lost'")
    assert ranks.world is None, "the ranks are not known to be in step"
    assert ranks.run(dist.get_rank) == [0, 1]


def test_a_job_that_hangs_is_given_up() -> None:
    world = World(2)
    world.run(faults.hangs, 0)  # imports done
    with pytest.raises(RanksLostError, match=r"ranks \[1\] hang"):
        world.run(faults.hangs, 600, patience=10)
    assert not world.alive
