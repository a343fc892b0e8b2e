"""Tracing which linears read the same input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import new_model
from torch import nn
from transformers import DeepseekV3Config, PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.common import projections
from nrl_models.common.projections.tracing import trace_linears
from nrl_models.families.deepseek_v3.model import DeepseekV3ForCausalLM
from nrl_models.testing.tiny import tiny_config

SIZE = 4


class Layer(nn.Module):
    """Six linears, called by `run` as the test requires."""

    def __init__(self, run: Callable[[Layer, torch.Tensor], Any]) -> None:
        super().__init__()
        for name in "abcdef":
            setattr(self, name, nn.Linear(SIZE, SIZE))
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def groups_of(run: Callable[[Layer, torch.Tensor], Any], **options: Any) -> list[tuple[str, ...]]:
    layer = Layer(run)
    return trace_linears(layer, lambda: layer(torch.randn(2, SIZE, **options))).groups.get("", [])


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda m, x: m.c(m.a(x) + m.b(x)), [("a", "b")]),
        (lambda m, x: (m.b(x), m.a(x)), [("b", "a")]),  # in the order of the calls
        (lambda m, x: (m.a(x), m.b(x), m.c(x.sin()), m.d(x)), [("a", "b", "d")]),
        (lambda m, x: (m.a(x), m.b(x + 0)), []),  # equal values are not the same tensor
        (lambda m, x: (m.a(x), m.b(x.clone())), []),
        (lambda m, x: (m.a(x), m.b(x.view(2, SIZE))), []),
        (lambda m, x: [(m.a(y), m.b(y), m.c(x), m.d(x)) for y in [x * 2]], [("a", "b"), ("c", "d")]),
        (lambda m, x: (m.a(x), m.a(x)), []),  # one linear is not a group
        (lambda m, x: (m.a(x), m.b(x), m.a(x.sin())), []),  # all calls count
        (lambda m, x: (m.a(x.sin()), m.b(x), m.a(x)), []),
        (lambda m, x: x, []),
    ],
)
def test_linears_with_same_input_tensor_form_group(run: Any, expected: list[tuple[str, ...]]) -> None:
    assert groups_of(run) == expected


def test_reused_tensor_ids_do_not_form_group() -> None:
    # Memory addresses, and so the ids of objects, are reused. 64 inputs are created one after another.
    def run(layer: Layer, x: torch.Tensor) -> None:
        for index in range(64):
            getattr(layer, "abcdef"[index % 6])(x + index)

    assert groups_of(run) == []


def test_linears_of_different_modules_form_no_group() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (Layer(lambda m, x: (m.a(x), m.b(x))) for _ in range(2))
            self.own = nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> Any:
            return self.own(x), self.first(x), self.second(x)

    pair = Pair()
    assert trace_linears(pair, lambda: pair(torch.randn(2, SIZE))).groups == {
        "first": [("a", "b")],
        "second": [("a", "b")],
    }


def test_linear_subclasses_are_excluded() -> None:
    class Special(nn.Linear):
        pass

    layer = Layer(lambda m, x: (m.a(x), m.b(x), m.c(x)))
    layer.b = Special(SIZE, SIZE)
    assert trace_linears(layer, lambda: layer(torch.randn(2, SIZE))).groups == {"": [("a", "c")]}


def test_traced_groups_match_family_declaration(llama: PreTrainedModel, input_ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_config(llama.config, combine=True)
    traced = trace_linears(llama, lambda: llama(input_ids)).groups
    assert traced["model.layers.1.self_attn"] == [("q_proj", "k_proj", "v_proj")]
    assert traced["model.layers.0.mlp"] == [("gate_proj", "up_proj")]
    assert len(traced) == 4
    assert trace_linears(model, lambda: model(input_ids)).groups == traced
    assert {owner: [tuple(group.linears)] for owner, _, group in projections.groups_of(model)} == traced


def test_latent_attention(input_ids: torch.Tensor) -> None:
    model = new_model(tiny_config(DeepseekV3Config, DeepseekV3ForCausalLM.tiny))
    traced = trace_linears(model, lambda: model(input_ids)).groups
    assert traced["model.layers.0.self_attn"] == [("q_a_proj", "kv_a_proj_with_mqa")]


def test_tracing_leaves_model_unchanged() -> None:
    layer = Layer(lambda m, x: m.a(x).sum())
    trace_linears(layer, lambda: layer(torch.randn(2, SIZE, requires_grad=True)))

    def fails() -> None:
        layer(torch.randn(2, SIZE))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_linears(layer, fails)
    assert not any(module._forward_pre_hooks for module in layer.modules())
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in layer.parameters())
