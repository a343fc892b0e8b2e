"""Pipeline stages compute, load, save and resume like one process: real processes, fp64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import pipeline
from world import World

from nrl_models.distributed.pipeline.schedules import Schedule

TIED: dict[str, Any] = {"num_hidden_layers": 4, "tie_word_embeddings": True}


@pytest.mark.parametrize("schedule", Schedule)
def test_every_schedule_equals_one_process(two: World, schedule: str) -> None:
    check(two.run(partial(pipeline.equals_one_process, config=TIED, pp=2), "LlamaForCausalLM", schedule))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_four_processes_equal_one(four: World, schedule: str) -> None:
    config = TIED | {"num_hidden_layers": 8}
    check(four.run(partial(pipeline.equals_one_process, config=config, pp=4), "LlamaForCausalLM", schedule))


FIRST, LAST = ("model.embed", "model.layers.0.", "model.layers.1."), ("model.norm", "lm_head", "model.layers.3.")


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("frozen", [FIRST, LAST], ids=["first", "last"])
def test_stages_may_be_frozen(two: World, schedule: str, frozen: tuple[str, ...]) -> None:
    job = partial(pipeline.equals_one_process, config={"num_hidden_layers": 4}, frozen=frozen, pp=2)
    check(two.run(job, "LlamaForCausalLM", schedule))


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_activations_may_be_recomputed(two: World, schedule: str) -> None:
    job = partial(pipeline.equals_one_process, config=TIED, recompute=True, pp=2)
    check(two.run(job, "LlamaForCausalLM", schedule))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_forward_alone_reads_what_one_process_does(two: World, schedule: str) -> None:
    for off in two.run(partial(pipeline.evaluates, pp=2), schedule, TIED):
        assert max(off) < 1e-10


def test_a_call_outside_of_a_step_is_refused(two: World) -> None:
    two.run(pipeline.called_outside_of_a_step)


def test_batches_that_do_not_fit_are_refused_on_every_rank(two: World) -> None:
    for said in two.run(pipeline.refused_batches):
        wanted = (
            "input_ids",
            "do not divide 6 sequences",
            "tokens",
            "labels",
            "shapes",
            "are too few: 1F1B takes 2",
            "BartDecoder",
        )
        for text, part in zip(said, wanted, strict=True):
            assert part in text


def test_a_mixture_equals_one_process(two: World) -> None:
    job = partial(pipeline.equals_one_process, config={"num_hidden_layers": 4}, dtype=torch.float32, pp=2)
    check(two.run(job, "MixtralForCausalLM", "ZBVZeroBubble"), 1e-5)  # grouped experts do not run in fp64


def test_hidden_states_that_are_not_contiguous_are_sent(two: World) -> None:
    job = partial(pipeline.equals_one_process, dtype=torch.float32, pp=2)
    check(two.run(job, "Inkling2ForCausalLM", "1F1B"), 1e-5)


@pytest.mark.parametrize("fault", pipeline.FAULTS)
def test_planted_faults_are_found(two: World, fault: str) -> None:
    found = two.run(partial(pipeline.equals_one_process, config=TIED, fault=fault, pp=2), "LlamaForCausalLM", "GPipe")
    assert max(rank["gradients"] for rank in found) > 1e-3


def check(found: list[dict[str, Any]], bound: float = 1e-10) -> None:
    for rank in found:
        assert rank["loss"] <= 1e-6
        assert rank["gradients"] <= bound
        assert rank["again"] <= bound, "what stages share is summed once for each step"
        assert rank["missing"] == []
        assert rank["scale"] > 0.01, "gradients too small for a mistake to show"


@pytest.mark.parametrize(
    ("schedule", "architecture"), [("1F1B", "LlamaForCausalLM"), ("DualPipeV", "MixtralForCausalLM")]
)
def test_each_rank_reads_its_stages_and_all_write_the_whole(
    two: World, tmp_path: Path, schedule: str, architecture: str
) -> None:
    config = TIED if architecture == "LlamaForCausalLM" else {"num_hidden_layers": 4}
    job = partial(pipeline.loads_saves_and_exports, pp=2)
    found = two.run(job, str(tmp_path), schedule, config, architecture)
    first, second = (set(rank["held"]) for rank in found)
    assert first | second == set(found[0]["all"])
    tied = architecture == "LlamaForCausalLM"
    assert first & second == ({"model.embed_tokens.weight", "lm_head.weight"} if tied else set())
    assert all(rank["read"] < 0.6 for rank in found)
    if not tied:
        assert sum(rank["read"] for rank in found) == pytest.approx(1)


def test_a_checkpoint_resumes_at_any_layout(two: World, tmp_path: Path) -> None:
    layouts: list[tuple[dict[str, int], str]] = [
        ({"pp": 2}, "1F1B"),
        ({"pp": 2}, "ZBVZeroBubble"),
        ({"fsdp": 2}, "1F1B"),
        ({"pp": 2}, "Interleaved1F1B"),
        ({"tp": 2}, "1F1B"),
        ({"pp": 2}, "GPipe"),
    ]
    for wanted, actual in two.run(pipeline.resumes, str(tmp_path), "LlamaForCausalLM", TIED, layouts):
        assert actual == pytest.approx(wanted, rel=1e-5)
