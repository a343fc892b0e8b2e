"""Ranks that differ in `ep` or `tp` process the same batch with the same random numbers, or raise."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from jobs import same_batch
from world import World

STATE = "the random state differs between the ranks of"


@pytest.mark.parametrize("dimension", ["ep", "tp"])
@pytest.mark.parametrize("reads", ["token_logprobs", "forward"])
def test_different_batches_without_gradients_raise(two: World, reads: str, dimension: str) -> None:
    job = partial(same_batch.batches_without_gradients, **{dimension: 2})
    assert two.run(job, reads) == [(f"input_ids differs between the ranks of {dimension}",)] * 2


def test_different_batches_without_gradients_work_over_fsdp(two: World) -> None:
    assert two.run(partial(same_batch.batches_without_gradients, fsdp=2), "token_logprobs") == [()] * 2


# Trainers with fused heads call the inner models.
@pytest.mark.parametrize(
    ("architecture", "call", "dimension"),
    [
        *(("MixtralForCausalLM", call, dimension) for call in same_batch.CALLS for dimension in ("ep", "tp")),
        *(("Qwen2_5_VLForConditionalGeneration", call, "tp") for call in ("model.model", "decoder")),
    ],
)
def test_different_batches_of_inner_and_compiled_models_raise(
    two: World, architecture: str, call: str, dimension: str
) -> None:
    job = partial(same_batch.compares, architecture, call, **{dimension: 2})
    assert two.run(job, True) == [((f"input_ids differs between the ranks of {dimension}",), 1)] * 2
    assert two.run(job, False) == [((), 1)] * 2


# A cache of keys and values, and one that also has recurrent states.
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_generate_compares_ranks_once(two: World, architecture: str) -> None:
    greedy = two.run(partial(same_batch.generates, do_sample=False), architecture, (0, 1))
    assert greedy == [((), 1)] * 2  # the prompt
    sampled = two.run(partial(same_batch.generates, do_sample=True), architecture, (3, 3))
    assert sampled == [((), 2)] * 2  # also the random state


def test_sampling_with_different_seeds_raises(two: World) -> None:
    outcomes = two.run(partial(same_batch.generates, do_sample=True), "LlamaForCausalLM", (0, 1))
    assert outcomes == [((f"{STATE} tp",), 1)] * 2


DROPOUT = {"hidden_dropout": 0.5, "attention_dropout": 0.0}
ATTENTION_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.5}
RANDOM: list[Any] = [
    ("GPTNeoXForCausalLM", DROPOUT, "tp"),
    ("GPTNeoXForCausalLM", DROPOUT | {"attention_dropout": 0.5}, "tp"),
    ("Phi3ForCausalLM", {"attention_dropout": 0.5}, "tp"),  # all ranks compute all heads
    ("MixtralForCausalLM", {"attention_dropout": 0.5}, "ep"),
    ("MixtralForCausalLM", {"router_jitter_noise": 0.3}, "ep"),
]


@pytest.mark.parametrize(("architecture", "config", "dimension"), RANDOM)
def test_different_random_states_raise(two: World, architecture: str, config: dict[str, Any], dimension: str) -> None:
    job = partial(same_batch.trains, architecture, config, **{dimension: 2})
    assert two.run(job, [0, 1]) == [(f"{STATE} {dimension}",)] * 2
    assert two.run(job, [1, 1]) == [()] * 2
    assert two.run(partial(job, training=False), [0, 1]) == [()] * 2


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("LlamaForCausalLM", {"attention_dropout": 0.5}),
        ("GPTNeoXForCausalLM", ATTENTION_DROPOUT),
        ("DeepseekV3ForCausalLM", {"attention_dropout": 0.5}),
    ],
)
def test_attention_dropout_of_local_heads_may_differ(two: World, architecture: str, config: dict[str, Any]) -> None:
    assert two.run(partial(same_batch.trains, architecture, config, tp=2), [0, 1]) == [()] * 2


def test_different_random_states_without_dropout(two: World) -> None:
    for dimension in ("ep", "tp"):
        assert two.run(partial(same_batch.trains, "MixtralForCausalLM", {}, **{dimension: 2}), [0, 1]) == [()] * 2


def test_different_random_states_in_one_stage_raise(four: World) -> None:
    job = partial(same_batch.trains, "GPTNeoXForCausalLM", DROPOUT, pp=2, tp=2)
    assert four.run(job, [0, 0, 1, 1]) == [()] * 4  # the stages of pp draw for other layers
    assert four.run(job, [0, 1, 0, 1]) == [(f"{STATE} tp",)] * 4
    first, second, third, fourth = four.run(job, [0, 0, 0, 1])
    assert third == fourth == (f"{STATE} tp",)
    for other in (first, second):  # the ranks of the other stage name those of this one
        assert [problem.split(" ShardingError")[0] for problem in other] == ["rank 2", "rank 3"]


def test_attention_dropout_of_local_heads_in_stages_may_differ(four: World) -> None:
    job = partial(same_batch.trains, "GPTNeoXForCausalLM", ATTENTION_DROPOUT, pp=2, tp=2)
    assert four.run(job, [0, 1, 2, 3]) == [()] * 4
