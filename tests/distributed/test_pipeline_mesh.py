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
def test_dense_model_matches_one_process(four: World, sizes: dict[str, int], schedule: str) -> None:
    check(four.run(partial(pipeline.equals_one_process, config=TIED, **sizes), "LlamaForCausalLM", schedule))


@pytest.mark.parametrize(("sizes", "schedule"), [(EP, "ZBVZeroBubble"), (TP, "1F1B")])
def test_moe_matches_one_process(four: World, sizes: dict[str, int], schedule: str) -> None:
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
def test_loading_and_saving_by_stages_and_shards(
    four: World, tmp_path: Path, architecture: str, sizes: dict[str, int], schedule: str
) -> None:
    config = TIED if architecture == "LlamaForCausalLM" else MIXTURE
    job = partial(pipeline.loads_saves_and_exports, **sizes)
    results = four.run(job, str(tmp_path), schedule, config, architecture)
    assert set().union(*(rank["held"] for rank in results)) == set(results[0]["all"])
    assert all(rank["read"] < 0.3 for rank in results)
    if sizes == FSDP:  # several ranks hold what the other mesh dimensions do not divide
        assert sum(rank["read"] for rank in results) == pytest.approx(1)


def test_evaluate_matches_one_process(four: World) -> None:
    for differences in four.run(partial(pipeline.evaluates, **FSDP), "1F1B", TIED):
        assert max(differences) < 1e-10


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_rank_error_raises_on_every_rank(four: World, method: str) -> None:
    *others, last = four.run(partial(pipeline.fails_in_the_loss, **FSDP), method)
    assert last == "ValueError: no such loss"
    for message in others:
        assert "rank 3: ValueError: no such loss" in message


@pytest.mark.parametrize(("change", "name"), [("replaced", "lm_head.weight"), ("added", "lm_head.extra")])
def test_changed_model_raises_on_every_rank(four: World, change: str, name: str) -> None:
    first, *_, last = four.run(partial(pipeline.errors_of_changed_model, **FSDP), change)
    for own, other in zip(last, first, strict=True):
        assert f"rank: {name}: was {change}" in own
        assert "rank 3: ShardingError" in other or "rank 2: ShardingError" in other


def test_checkpoint_resumes_on_other_meshes(four: World, tmp_path: Path) -> None:
    layouts = [(FSDP, "1F1B"), (TP, "ZBVZeroBubble"), ({"fsdp": 2, "tp": 2}, "1F1B")]
    for wanted, actual in four.run(pipeline.resumes, str(tmp_path), "LlamaForCausalLM", TIED, layouts):
        assert actual == pytest.approx(wanted, rel=1e-5)
