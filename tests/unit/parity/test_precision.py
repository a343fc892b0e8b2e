"""Below fp32, correct models pass. Bugs fail that a bound on logits would miss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from patterns import ONE_OF_EACH_PATTERN
from torch import nn
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.parity import compare_components, compare_end_to_end, compare_gradients
from nrl_models.parity.parity_report import ParityRow
from nrl_models.parity.precision import SAME_BITS, Errors, Truth
from nrl_models.testing.case import FamilyCase

BF16 = torch.bfloat16


@cache
def case_of(architecture: str) -> FamilyCase:
    return FamilyCase(registry.model_class(architecture))


def rows_of(case: FamilyCase, model: PreTrainedModel, *, gradients: bool = True) -> list[ParityRow]:
    reference = case.reference(BF16)
    truth = Truth(reference)
    rows = compare_components(model, reference, case.inputs(), truth=truth)
    rows += compare_end_to_end(model, reference, case.inputs(), truth)
    if gradients:
        rows += compare_gradients(model, reference, case.inputs(labels=True), truth)
    return rows


DECODERS = [
    next(name for name in registry.FAMILIES[family] if name.endswith("ForCausalLM")) for family in ONE_OF_EACH_PATTERN
]
SPECIAL_CASES = {
    "RecurrentGemmaForCausalLM": "its modules keep what their last forward left",
    "MllamaForConditionalGeneration": "gates of a single value, whose error transformers has near zero by chance",
    "NemotronH_Omni_Reasoning_V3": "its tower takes dtypes from the configuration, and it is its own `base_model`",
}


@pytest.mark.long
@pytest.mark.parametrize("architecture", [*DECODERS, *SPECIAL_CASES])
def test_correct_models_pass(architecture: str) -> None:
    case = case_of(architecture)
    rows = rows_of(case, case.model(BF16))
    assert [row for row in rows if not row.passed] == []
    checks = [row.check for row in rows]
    assert "level 3: logits, bfloat16" in checks
    assert "gradients, bfloat16" in checks
    assert sum(check.startswith("level 2") for check in checks) > 3


def layer(model: PreTrainedModel) -> nn.Module:
    return model.model.layers[1]


def sums_in_another_order(model: PreTrainedModel) -> None:
    """Sum matmuls in another order, as other hardware does: two parts are summed in fp32 and rounded once."""

    def forward(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            parts = zip(x.float().chunk(2, -1), linear.weight.float().chunk(2, -1), strict=True)
            return sum(part @ weight.T for part, weight in parts).to(x.dtype)  # type: ignore[union-attr]

        return run

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = forward(module)


def test_different_summation_order_passes() -> None:
    case = case_of("LlamaForCausalLM")
    _, model = case.new_pair(BF16)
    sums_in_another_order(model)
    rows = rows_of(case, model, gradients=False)
    assert [row for row in rows if not row.passed] == []
    assert any("times" in row.measured for row in rows), "the test changes nothing"


def norm_in_bf16(model: PreTrainedModel) -> None:
    norm: Any = layer(model).input_layernorm

    def forward(x: torch.Tensor) -> torch.Tensor:
        return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))

    norm.forward = forward


def rope_in_bf16(model: PreTrainedModel) -> None:
    rotary: Any = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


@torch.no_grad()
def scaled_by_one_percent(model: PreTrainedModel) -> None:
    layer(model).self_attn.o_proj.weight.mul_(1.01)


@torch.no_grad()
def queries_scaled_by_one_percent(model: PreTrainedModel) -> None:
    layer(model).self_attn.q_proj.weight.mul_(1.01)


@torch.no_grad()
def gate_and_up_exchanged(model: PreTrainedModel) -> None:
    gate, up = layer(model).mlp.gate_proj.weight, layer(model).mlp.up_proj.weight
    original_gate = gate.clone()
    gate.copy_(up)
    up.copy_(original_gate)


def query_norm_omitted(model: PreTrainedModel) -> None:
    layer(model).self_attn.q_norm.forward = lambda x: x


@torch.no_grad()
def bias_dropped(model: PreTrainedModel) -> None:
    layer(model).self_attn.k_proj.bias.zero_()


def soft_cap_dropped(model: PreTrainedModel) -> None:
    layer(model).self_attn.attn_logit_softcapping = None


@torch.no_grad()
def experts_scaled_by_one_percent(model: PreTrainedModel) -> None:
    layer(model).mlp.experts.down_proj.mul_(1.01)


BUGS: dict[Callable[[PreTrainedModel], None], tuple[str, str]] = {
    norm_in_bf16: ("LlamaForCausalLM", "LlamaRMSNorm"),
    rope_in_bf16: ("LlamaForCausalLM", "LlamaRotaryEmbedding"),
    scaled_by_one_percent: ("LlamaForCausalLM", "LlamaAttention"),
    queries_scaled_by_one_percent: ("LlamaForCausalLM", "LlamaAttention"),
    gate_and_up_exchanged: ("LlamaForCausalLM", "LlamaMLP"),
    query_norm_omitted: ("Qwen3ForCausalLM", "Qwen3RMSNorm"),
    bias_dropped: ("Qwen2ForCausalLM", "Qwen2Attention"),
    soft_cap_dropped: ("Gemma2ForCausalLM", "Gemma2Attention"),
    experts_scaled_by_one_percent: ("Qwen3MoeForCausalLM", "Qwen3MoeExperts"),
}
"""The bug in one layer, the model, and the class whose row has to fail."""


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_bug_in_one_layer_is_detected(bug: Callable[[PreTrainedModel], None]) -> None:
    architecture, wrong_class = BUGS[bug]
    case = case_of(architecture)
    _, model = case.new_pair(BF16)
    bug(model)
    rows = rows_of(case, model, gradients=False)
    failed = {row.check: row for row in rows if not row.passed}
    assert f"level 2: {wrong_class}, bfloat16" in failed, [(row.check, row.measured) for row in rows]
    assert failed[f"level 2: {wrong_class}, bfloat16"].detail.startswith("worst: model.")
    if bug in (norm_in_bf16, rope_in_bf16):
        assert failed[f"level 2: {wrong_class}, bfloat16"].expected == SAME_BITS, "it has no matrices"


def test_gradients_below_fp32() -> None:
    case = case_of("LlamaForCausalLM")
    _, model = case.new_pair(BF16)
    gate_and_up_exchanged(model)
    reference, inputs = case.reference(BF16), case.inputs(labels=True)
    (row,) = compare_gradients(model, reference, inputs)
    assert not row.passed
    assert row.detail.startswith("worst: model.layers.")
    layer(model).mlp.down_proj.weight.requires_grad_(False)
    (row,) = compare_gradients(model, reference, inputs)
    assert row.measured == "none for ['model.layers.1.mlp.down_proj.weight']"


def test_errors_are_relative_to_each_row() -> None:
    exact = torch.tensor([[3.0, 4.0], [300.0, 400.0]])
    errors = Errors.of(exact * torch.tensor([[1.01], [1.03]]), exact)
    assert errors.rms == pytest.approx(math.sqrt((0.01**2 + 0.03**2) / 2), rel=1e-4)
    assert errors.largest == pytest.approx(0.03 * 400 / math.sqrt((300**2 + 400**2) / 2), rel=1e-4)


@pytest.mark.parametrize(
    ("actual", "infinite"),
    [([1.0, -math.inf], False), ([math.nan, -math.inf], True), ([1.0, 0.0], True), ([1.0, math.nan], True)],
)
def test_non_finite_values(actual: list[float], infinite: bool) -> None:
    """Masked scores that are equal in both models agree."""
    errors = Errors.of(torch.tensor([actual]), torch.tensor([[1.0, -math.inf]]))
    assert math.isinf(errors.rms) is infinite
    assert math.isinf(errors.largest) is infinite


def test_errors_of_other_shapes_and_of_scalars() -> None:
    assert Errors.of(torch.zeros(2), torch.zeros(3)).largest == math.inf
    assert Errors.of(torch.tensor(1.5), torch.tensor(1.0)) == (0.5, 0.5)
    assert Errors.of(torch.zeros(0, 3), torch.zeros(0, 3)) == (0.0, 0.0)
