"""The real Megatron-Core with weights in its layout equals our models: fp32, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import megatron
from jobs.setting import case_of
from world import World

from nrl_models.parity.parity_report import Level

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
"""Architectures that Megatron's GPT model supports, found by trying all decoders."""

UNSUPPORTED = {
    "Gemma2ForCausalLM": "pre_feedforward_layernorm",  # a tensor without a counterpart
    "GemmaForCausalLM": "has other logits",
    "GraniteForCausalLM": "has other logits",
    "OlmoForCausalLM": "is only in Megatron's model",  # its norms have no weights
    "PhimoeForCausalLM": "has other logits",
    "Qwen3NextForCausalLM": "linear_attn",
    "Ministral3ForCausalLM": "yarn",
}


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: install the extra `megatron`")


@pytest.fixture(scope="module")
def one_process() -> Iterator[World]:
    """A world of one process, because Megatron keeps its state in globals."""
    world = World(1)
    yield world
    world.close()


@pytest.fixture(params=[{"tp": 2}, {"pp": 2}], ids=["tp=2", "pp=2"], scope="module")
def two_processes(request: pytest.FixtureRequest) -> Iterator[tuple[World, dict[str, int]]]:
    """Two processes, and Megatron's parallelism over them."""
    world = World(2)
    yield world, request.param
    world.close()


@pytest.mark.parametrize("architecture", EQUAL)
def test_parity_passes(one_process: World, architecture: str) -> None:
    (rows,) = one_process.run(megatron.levels, architecture)
    assert [row.level for row in rows] == list(Level)
    assert [row for row in rows if not row.passed] == []


@pytest.mark.parametrize(
    ("fault", "level", "module"),
    [
        ("another epsilon", Level.COMPONENTS, "model.layers.1"),
        ("a layer's weight stale", Level.WEIGHTS, "decoder.layers.1.mlp.linear_fc2.weight"),
        ("gate and up exchanged", Level.COMPONENTS, "model.layers.0"),
        ("an untrained head", Level.GRADIENTS, "output_layer.weight"),
    ],
)
def test_parity_names_location_of_fault(one_process: World, fault: str, level: Level, module: str) -> None:
    (rows,) = one_process.run(megatron.levels, "LlamaForCausalLM", fault)
    failed = {row.level: f"{row.measured} {row.detail}" for row in rows if not row.passed}
    assert module in failed[level]
    assert "and" not in failed[level].split("differ: ")[-1]  # only one module
    if fault == "an untrained head":
        assert list(failed) == [Level.GRADIENTS]
    if fault == "another epsilon":
        assert Level.WEIGHTS not in failed


def test_parity_command_with_second_trainer(tmp_path: Path) -> None:
    case_of("LlamaForCausalLM").model().save_pretrained(tmp_path / "llama")
    case_of("GemmaForCausalLM").model().save_pretrained(tmp_path / "gemma")
    command = [sys.executable, "-m", "nrl_models", "parity", "--second-trainer", "megatron", "--length", "16"]
    report = tmp_path / "report.json"
    subprocess.run([*command, str(tmp_path / "llama"), "--json", str(report)], check=True, timeout=300)
    checks = [row["check"] for row in json.loads(report.read_text())["checks"]]
    assert "level 3: logits, float32" in checks
    assert "level 3: Megatron's logits" in checks
    completed = subprocess.run([*command, str(tmp_path / "gemma")], capture_output=True, text=True, timeout=300)
    assert completed.returncode != 0
    assert "has other logits" in " ".join(completed.stderr.split())


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
def test_parallel_logits_match(
    two_processes: tuple[World, dict[str, int]], architecture: str, choices: dict[str, Any]
) -> None:
    world, sizes = two_processes
    # Megatron supports experts with TP only under sequence parallelism, which its CPU norms do not support.
    computes = "tp" not in sizes or "Moe" not in architecture
    assert max(world.run(partial(megatron.share_equals_ours, **sizes), architecture, choices, computes)) < 1e-5


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_unsupported_architectures_raise(one_process: World, architecture: str) -> None:
    (message,) = one_process.run(megatron.error_for, architecture)
    assert UNSUPPORTED[architecture] in message


@pytest.mark.parametrize("fault", ["gate and up exchanged", "q, k, v not by group", "keys and values exchanged"])
def test_wrong_layout_raises(one_process: World, fault: str) -> None:
    (message,) = one_process.run(megatron.error_for_fault, fault)
    assert "has other logits" in message
