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
def test_every_schedule_matches_one_process(two: World, schedule: str) -> None:
    check(two.run(partial(pipeline.equals_one_process, config=TIED, pp=2), "LlamaForCausalLM", schedule))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_four_stages_match_one_process(four: World, schedule: str) -> None:
    config = TIED | {"num_hidden_layers": 8}
    check(four.run(partial(pipeline.equals_one_process, config=config, pp=4), "LlamaForCausalLM", schedule))


FIRST, LAST = ("model.embed", "model.layers.0.", "model.layers.1."), ("model.norm", "lm_head", "model.layers.3.")


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("frozen", [FIRST, LAST], ids=["first", "last"])
def test_frozen_stages_match_one_process(two: World, schedule: str, frozen: tuple[str, ...]) -> None:
    job = partial(pipeline.equals_one_process, config={"num_hidden_layers": 4}, frozen=frozen, pp=2)
    check(two.run(job, "LlamaForCausalLM", schedule))


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_activation_checkpointing_matches_one_process(two: World, schedule: str) -> None:
    job = partial(pipeline.equals_one_process, config=TIED, recompute=True, pp=2)
    check(two.run(job, "LlamaForCausalLM", schedule))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_evaluate_matches_one_process(two: World, schedule: str) -> None:
    for differences in two.run(partial(pipeline.evaluates, pp=2), schedule, TIED):
        assert max(differences) < 1e-10


def test_model_call_outside_step_raises(two: World) -> None:
    two.run(pipeline.calls_outside_step)


def test_invalid_batches_raise_on_every_rank(two: World) -> None:
    for messages in two.run(pipeline.errors_of_invalid_batches):
        wanted = (
            "input_ids",
            "do not divide 6 sequences",
            "tokens",
            "labels",
            "shapes",
            "are too few: 1F1B takes 2",
            "BartDecoder",
        )
        for text, part in zip(messages, wanted, strict=True):
            assert part in text


def test_moe_matches_one_process(two: World) -> None:
    job = partial(pipeline.equals_one_process, config={"num_hidden_layers": 4}, dtype=torch.float32, pp=2)
    check(two.run(job, "MixtralForCausalLM", "ZBVZeroBubble"), 1e-5)  # grouped experts do not run in fp64


def test_non_contiguous_hidden_states(two: World) -> None:
    job = partial(pipeline.equals_one_process, dtype=torch.float32, pp=2)
    check(two.run(job, "Inkling2ForCausalLM", "1F1B"), 1e-5)


@pytest.mark.parametrize("fault", pipeline.FAULTS)
def test_planted_faults_are_detected(two: World, fault: str) -> None:
    results = two.run(partial(pipeline.equals_one_process, config=TIED, fault=fault, pp=2), "LlamaForCausalLM", "GPipe")
    assert max(rank["gradients"] for rank in results) > 1e-3


def check(results: list[dict[str, Any]], bound: float = 1e-10) -> None:
    for rank in results:
        assert rank["loss"] <= 1e-6
        assert rank["gradients"] <= bound
        assert rank["again"] <= bound, "gradients shared by stages are summed once per step"
        assert rank["missing"] == []
        assert rank["scale"] > 0.01, "gradients are too small to reveal errors"


@pytest.mark.parametrize(
    ("schedule", "architecture"), [("1F1B", "LlamaForCausalLM"), ("DualPipeV", "MixtralForCausalLM")]
)
def test_loading_and_saving_by_stages(two: World, tmp_path: Path, schedule: str, architecture: str) -> None:
    config = TIED if architecture == "LlamaForCausalLM" else {"num_hidden_layers": 4}
    job = partial(pipeline.loads_saves_and_exports, pp=2)
    results = two.run(job, str(tmp_path), schedule, config, architecture)
    first, second = (set(rank["held"]) for rank in results)
    assert first | second == set(results[0]["all"])
    tied = architecture == "LlamaForCausalLM"
    assert first & second == ({"model.embed_tokens.weight", "lm_head.weight"} if tied else set())
    assert all(rank["read"] < 0.6 for rank in results)
    if not tied:
        assert sum(rank["read"] for rank in results) == pytest.approx(1)


def test_checkpoint_resumes_on_other_meshes(two: World, tmp_path: Path) -> None:
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
