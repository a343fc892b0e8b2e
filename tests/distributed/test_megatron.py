"""Megatron-Core, for real, computes with weights in its layout what our models compute: fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from jobs import megatron
from world import World

EQUAL = (
    "ArceeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Emu3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "Jais2ForCausalLM",
    "LlamaForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "YoutuForCausalLM",
)
"""Architectures that Megatron's GPT model computes, as found by trying all decoders."""

REFUSED = {
    "Gemma2ForCausalLM": "pre_feedforward_layernorm",  # a tensor without a place
    "GemmaForCausalLM": "gives other logits",
    "GraniteForCausalLM": "gives other logits",
    "OlmoForCausalLM": "is in Megatron's model alone",  # its norms have no weights
    "PhimoeForCausalLM": "gives other logits",
    "Qwen3NextForCausalLM": "linear_attn",
    "Ministral3ForCausalLM": "yarn",
}


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: install the extra `megatron`")


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    """A process of its own: Megatron keeps its state in globals."""
    world = World(1)
    yield world
    world.close()


@pytest.fixture(params=[{"tp": 2}, {"pp": 2}], ids=["tp=2", "pp=2"], scope="module")
def divided(request: pytest.FixtureRequest) -> Iterator[tuple[World, dict[str, int]]]:
    """Two processes, and what Megatron divides over them."""
    world = World(2)
    yield world, request.param
    world.close()


@pytest.mark.parametrize("architecture", EQUAL)
def test_logits_and_gradients_are_ours(alone: World, architecture: str) -> None:
    ((logits, gradients),) = alone.run(megatron.equals_ours, architecture)
    assert logits < 1e-5
    assert gradients < 1e-4


@pytest.mark.parametrize(
    ("architecture", "choices"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"moe_router_pre_softmax": True}),
        ("Qwen2MoeForCausalLM", {"moe_router_pre_softmax": True}),
        ("Starcoder2ForCausalLM", {}),
    ],
)
def test_each_rank_gets_its_share(
    divided: tuple[World, dict[str, int]], architecture: str, choices: dict[str, Any]
) -> None:
    world, sizes = divided
    # Megatron has experts with TP under sequence parallelism alone, which its norms for a CPU lack.
    computes = "tp" not in sizes or "Moe" not in architecture
    assert max(world.run(partial(megatron.share_equals_ours, **sizes), architecture, choices, computes)) < 1e-5


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_megatron_does_not_compute_is_refused(alone: World, architecture: str) -> None:
    (said,) = alone.run(megatron.refusal, architecture)
    assert REFUSED[architecture] in said


@pytest.mark.parametrize("fault", ["gate and up exchanged", "q, k, v not by group", "keys and values exchanged"])
def test_a_wrong_layout_is_found(alone: World, fault: str) -> None:
    (said,) = alone.run(megatron.planted, fault)
    assert "gives other logits" in said
