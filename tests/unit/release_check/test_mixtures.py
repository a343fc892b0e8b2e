"""Sections of `numbers` for mixtures of experts show planted errors, and use checkpoints that other libraries read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import moe
from versions import since

from tools.release_check.numbers import mixtures
from tools.release_check.numbers.cases import NumberCase, stored_tensors
from tools.release_check.numbers.facts import Kind, relative_difference
from tools.release_check.numbers.recorded import NotApplicableError, Recorded
from tools.release_check.numbers.variants import shared_states

FP4, INT4 = "NVFP4A16", "W4A16"


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return recorded_class("Qwen3MoeForCausalLM", tmp_path)


def recorded_class(name: str, folder: Path) -> Recorded:
    case = NumberCase.from_file(name)
    model_class = case.model_class()
    assert model_class is not None
    return Recorded(case, model_class, folder)


@pytest.fixture
def unmasked() -> Iterator[None]:
    """Give routing weights of other ranks' experts a gradient, as transformers 5.8 to 5.17 do."""
    original = moe.ALL_EXPERTS_FUNCTIONS["batched_mm"]

    def forward(self: Any, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return original(self, hidden, indices.clamp(max=self.num_experts - 1), weights)

    moe.ALL_EXPERTS_FUNCTIONS["batched_mm"] = forward
    yield
    moe.ALL_EXPERTS_FUNCTIONS["batched_mm"] = original


def test_expert_parallel_is_deterministic(recorded: Recorded) -> None:
    assert mixtures.expert_parallel(recorded) == mixtures.expert_parallel(recorded)


@since("5.18")  # older releases have the planted error
def test_expert_parallel_detects_wrong_routing_gradients(recorded: Recorded, request: pytest.FixtureRequest) -> None:
    before = mixtures.expert_parallel(recorded)
    request.getfixturevalue("unmasked")
    after = mixtures.expert_parallel(recorded)
    assert relative_difference(before[Kind.NUMBERS]["output"], after[Kind.NUMBERS]["output"]) < 1e-6
    gradients = [facts[Kind.GRADIENTS]["routing weights"] for facts in (before, after)]
    assert relative_difference(*gradients) > 0.01


@pytest.mark.parametrize(("preset", "error"), [(INT4, 0.2), (FP4, 0.2)])
def test_quantized_checkpoint_is_close_to_fixture(recorded: Recorded, preset: str, error: float) -> None:
    """compressed-tensors decompresses every quantized expert."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    path = mixtures._write_quantized(recorded, preset)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor: Any = BaseCompressor.get_value_from_registry(config["format"])
    tensors, original = stored_tensors(path), recorded.case.checkpoint()
    owners = {name.removesuffix("weight_packed") for name in tensors if name.endswith("weight_packed")}
    assert owners == {name.removesuffix("weight") for name in original if mixtures.EXPERT_LINEAR.search(name)}
    for owner in owners:
        state = {name.removeprefix(owner): tensor for name, tensor in tensors.items() if name.startswith(owner)}
        weight = compressor.decompress(state, scheme)["weight"].float()
        assert (weight - original[f"{owner}weight"]).norm() < error * original[f"{owner}weight"].norm()


@since("5.13")  # older releases do not load them
def test_int4_experts_are_dequantized(recorded: Recorded) -> None:
    pytest.importorskip("compressed_tensors")
    facts = mixtures.int4_experts(recorded)
    assert facts[Kind.LOADING] == {}
    with torch.no_grad():
        expected = recorded.model()(**recorded.any_inputs(), use_cache=False).logits
    assert relative_difference(facts[Kind.NUMBERS]["logits"], mixtures.fingerprint(expected)) < 0.2


def test_dense_model_raises_not_applicable(tmp_path: Path) -> None:
    llama = recorded_class("LlamaForCausalLM", tmp_path)
    for section in (mixtures.expert_parallel, mixtures.int4_experts, mixtures.fp4_experts, shared_states):
        with pytest.raises(NotApplicableError):
            section(llama)


def test_shared_states(tmp_path: Path) -> None:
    gemma = recorded_class("Gemma4ForCausalLM", tmp_path)
    logits = shared_states(gemma)[Kind.NUMBERS]["logits"]
    assert logits == shared_states(gemma)[Kind.NUMBERS]["logits"]
    assert None not in logits
