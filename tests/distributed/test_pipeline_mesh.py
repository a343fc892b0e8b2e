"""Pipeline stages combined with sharded data, linears or experts: four real processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from jobs import pipeline
from test_pipeline import TIED, check
from world import World

FSDP, TP, EP = {"pp": 2, "fsdp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "ep": 2}
MIXTURE = {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("sizes", "schedule"), [(FSDP, "1F1B"), (FSDP, "ZBVZeroBubble"), (TP, "InterleavedZeroBubble")]
)
def test_it_equals_one_process(four: World, sizes: dict[str, int], schedule: str) -> None:
    check(four.run(partial(pipeline.equals_one_process, config=TIED, **sizes), "LlamaForCausalLM", schedule))


@pytest.mark.parametrize(("sizes", "schedule"), [(EP, "ZBVZeroBubble"), (TP, "1F1B")])
def test_a_mixture_equals_one_process(four: World, sizes: dict[str, int], schedule: str) -> None:
    job = partial(pipeline.equals_one_process, config=MIXTURE, dtype=torch.float32, **sizes)
    check(four.run(job, "MixtralForCausalLM", schedule), 1e-5)  # grouped experts do not run in fp64


@pytest.mark.parametrize(
    ("architecture", "sizes", "schedule"),
    [
        ("LlamaForCausalLM", FSDP, "ZBVZeroBubble"),
        ("LlamaForCausalLM", TP, "1F1B"),
        ("MixtralForCausalLM", EP, "1F1B"),
    ],
)
def test_each_rank_reads_its_shares_and_all_write_the_whole(
    four: World, tmp_path: Path, architecture: str, sizes: dict[str, int], schedule: str
) -> None:
    config = TIED if architecture == "LlamaForCausalLM" else MIXTURE
    job = partial(pipeline.loads_saves_and_exports, **sizes)
    found = four.run(job, str(tmp_path), schedule, config, architecture)
    assert set().union(*(rank["held"] for rank in found)) == set(found[0]["all"])
    assert all(rank["read"] < 0.3 for rank in found)
    if sizes == FSDP:  # several ranks hold what the other mesh dimensions do not divide
        assert sum(rank["read"] for rank in found) == pytest.approx(1)


def test_a_forward_alone_reads_what_one_process_does(four: World) -> None:
    for off in four.run(partial(pipeline.evaluates, **FSDP), "1F1B", TIED):
        assert max(off) < 1e-10


@pytest.mark.parametrize("where", ["step", "evaluate"])
def test_an_error_of_a_rank_is_all_ranks(four: World, where: str) -> None:
    *others, last = four.run(partial(pipeline.fails_in_the_loss, **FSDP), where)
    assert last == "ValueError: no such loss"
    for said in others:
        assert "rank 3: ValueError: no such loss" in said


def test_a_checkpoint_resumes_at_any_layout(four: World, tmp_path: Path) -> None:
    layouts = [(FSDP, "1F1B"), (TP, "ZBVZeroBubble"), ({"fsdp": 2, "tp": 2}, "1F1B")]
    for wanted, actual in four.run(pipeline.resumes, str(tmp_path), "LlamaForCausalLM", TIED, layouts):
        assert actual == pytest.approx(wanted, rel=1e-5)
