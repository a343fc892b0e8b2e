"""Each level passes on a correct model. On a wrong one it fails at the right row."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.parity import (
    compare_components,
    compare_end_to_end,
    compare_gradients,
    compare_weights,
    localize,
)
from nrl_models.testing.case import FamilyCase

Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture
def case() -> FamilyCase:
    return FamilyCase(registry.model_class("LlamaForCausalLM"))


@pytest.fixture
def pair(case: FamilyCase) -> Pair:
    """Reference and model. Tests may change them."""
    return case.new_pair()


def layer(model: PreTrainedModel, index: int = 1) -> torch.nn.Module:
    return model.model.layers[index]


def wrong_eps(model: PreTrainedModel) -> None:
    layer(model).input_layernorm.variance_epsilon = 0.3


def swapped_gate_and_up(model: PreTrainedModel) -> None:
    weight = layer(model).mlp.gate_up_proj.weight
    with torch.no_grad():
        weight.copy_(weight.clone().roll(weight.shape[0] // 2, 0))


def one_wrong_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        layer(model).self_attn.k_proj.weight[3] += 0.5


def wrong_scaling(model: PreTrainedModel) -> None:
    layer(model).self_attn.scaling *= 1.1


def wrong_rope_base(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.9


BUGS: dict[Callable[[PreTrainedModel], None], str] = {
    wrong_eps: "model.layers.1.input_layernorm",
    swapped_gate_and_up: "model.layers.1.mlp.gate_proj",
    one_wrong_weight: "model.layers.1.self_attn.k_proj",
    wrong_scaling: "model.layers.1.self_attn",
    wrong_rope_base: "model.rotary_emb",
}
"""Bugs, and the innermost module whose output differs first."""

bugs = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)


def test_all_levels_pass_on_correct_model(case: FamilyCase, pair: Pair) -> None:
    reference, model = pair
    rows = [
        *compare_weights(model, reference),
        *compare_components(model, reference, case.inputs()),
        *compare_end_to_end(model, reference, case.inputs()),
        *compare_gradients(model, reference, case.inputs(labels=True)),
    ]
    assert [row.check for row in rows if not row.passed] == []
    assert {"level 2: LlamaAttention", "level 2: LlamaMLP", "level 2: LlamaDecoderLayer"} <= {row.check for row in rows}
    assert localize(model, reference, case.inputs()) == []


@bugs
def test_end_to_end_and_gradients_fail_on_bug(
    case: FamilyCase, pair: Pair, bug: Callable[[PreTrainedModel], None]
) -> None:
    reference, model = pair
    bug(model)
    assert not compare_end_to_end(model, reference, case.inputs())[0].passed
    assert not compare_gradients(model, reference, case.inputs(labels=True))[0].passed


@bugs
def test_localize_finds_wrong_module(case: FamilyCase, pair: Pair, bug: Callable[[PreTrainedModel], None]) -> None:
    reference, model = pair
    bug(model)
    culprits = localize(model, reference, case.inputs())
    assert culprits[0].module == BUGS[bug]
    assert culprits[-1].confirmed, "with the reference's outputs in place the divergence must vanish"
    assert bool(culprits[0].weights) is (bug in (swapped_gate_and_up, one_wrong_weight))


def test_localize_finds_two_bugs(case: FamilyCase, pair: Pair) -> None:
    reference, model = pair
    wrong_eps(model)
    with torch.no_grad():
        model.lm_head.weight[0] += 1.0
    culprits = localize(model, reference, case.inputs())
    assert [culprit.module for culprit in culprits] == ["model.layers.1.input_layernorm", "lm_head"]
    assert [culprit.confirmed for culprit in culprits] == [False, True]
    assert "lm_head.weight" in str(culprits[1])


def test_weights_level_names_wrong_tensor(pair: Pair) -> None:
    reference, model = pair
    one_wrong_weight(model)
    row = compare_weights(model, reference)[0]
    assert not row.passed
    assert "model.layers.1.self_attn.k_proj.weight: max_diff=5.0" in row.measured


def test_weights_level_detects_wrong_buffer(pair: Pair) -> None:
    reference, model = pair
    wrong_rope_base(model)
    rows = {row.check: row for row in compare_weights(model, reference)}
    assert not rows["level 1: buffers"].passed
    assert "model.rotary_emb.inv_freq" in rows["level 1: buffers"].measured


def test_weights_level_detects_untied_weights() -> None:
    case = FamilyCase(registry.model_class("Gemma2ForCausalLM"))
    reference, model = case.new_pair()
    assert all(row.passed for row in compare_weights(model, reference))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    rows = {row.check: row for row in compare_weights(model, reference)}
    assert not rows["level 1: tied weights"].passed


def test_component_level_names_wrong_layer(case: FamilyCase, pair: Pair) -> None:
    reference, model = pair
    layer(model, 0).self_attn.scaling *= 1.1
    failed = {row.check for row in compare_components(model, reference, case.inputs()) if not row.passed}
    assert failed == {"level 2: LlamaAttention", "level 2: LlamaDecoderLayer"}


def test_missing_gradient_is_named(case: FamilyCase, pair: Pair) -> None:
    reference, model = pair
    layer(model).mlp.down_proj.weight.requires_grad_(False)
    row = compare_gradients(model, reference, case.inputs(labels=True))[0]
    assert not row.passed
    assert "model.layers.1.mlp.down_proj.weight" in row.measured


def test_checks_leave_models_unchanged(case: FamilyCase, pair: Pair) -> None:
    reference, model = pair
    compare_gradients(model, reference, case.inputs(labels=True))
    localize(model, reference, case.inputs())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
