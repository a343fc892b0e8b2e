"""The sweep over all architectures sees what it is for, and outlives an architecture that takes its processes down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import faults
from world import RanksLostError, World

from nrl_models.devtools.sharding_outcomes import AGREES, status
from tests.distributed import sweep


@pytest.fixture(scope="module")
def ranks() -> Iterator[sweep.Ranks]:
    ranks = sweep.Ranks()
    yield ranks
    ranks.close()


def test_an_architecture_with_experts_is_tried_in_every_way(ranks: sweep.Ranks, tmp_path: Path) -> None:
    outcome = ranks.hold("MixtralForCausalLM", str(tmp_path))
    assert outcome.pop("qlora", AGREES) == AGREES
    assert outcome == {"fsdp": AGREES, "tp": AGREES, "ep": AGREES}


def test_what_cannot_be_divided_is_refused_with_the_reason(ranks: sweep.Ranks) -> None:
    found, failed = ranks.run(faults.refuses)
    assert not found
    assert status(failed) == "refused"
    assert "has 3 heads" in failed
    assert ranks.world is not None, "the processes go on"


def test_wrong_weights_losses_and_gradients_are_seen(ranks: sweep.Ranks) -> None:
    (words, _), failed = ranks.run(faults.differs)
    assert not failed
    assert words == [
        ["exported weights are not those of the checkpoint: lm_head.weight"],
        ["exports other tensors: lm_head.weight"],
        "gradients",
        "loss, gradients",
        "gradients",
    ]


def test_the_sweep_goes_on_after_processes_that_end_or_part(ranks: sweep.Ranks) -> None:
    assert ranks.run(faults.ends)[1] == "error: ranks ended, with exit status: {1: 3}; others: nothing"
    assert ranks.run(faults.raises)[1] == "error: KeyError: 'lost'"
    assert ranks.world is None, "the ranks are not known to be in step"
    assert ranks.run(dist.get_rank) == ([0, 1], "")


def test_a_job_that_hangs_is_given_up() -> None:
    world = World(2)
    world.run(faults.hangs, 0)  # imports done
    with pytest.raises(RanksLostError, match=r"ranks \[1\] hang"):
        world.run(faults.hangs, 600, patience=10)
    assert not world.alive
