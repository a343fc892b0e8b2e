"""Optimizer states between combined and separate weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import new_model, problems
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.common.optimizer_state import keep_in_transformers_layout
from nrl_models.errors import StateDictError
from nrl_models.testing.tiny import tiny_config

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-3),
    "AMSGrad, fused": lambda parameters: AdamW(parameters, lr=1e-3, amsgrad=True, fused=True),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9),
    "SGD": lambda parameters: SGD(parameters, lr=1e-2),
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "biases": tiny_config(LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "tied": tiny_config(LlamaConfig, {"tie_word_embeddings": True}),
    "stacked experts": tiny_config(MixtralConfig),
}


def pair(config: PreTrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """transformers' model and ours, with the same weights."""
    reference = new_model(config)
    model = AutoModelForCausalLM.from_config(reference.config)
    model.load_state_dict(reference.state_dict(), strict=False)
    return reference, model


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors, as trainers separate them for weight decay."""
    named = list(model.named_parameters())
    return [
        {"params": [one for _, one in named if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for _, one in named if one.ndim == 1], "weight_decay": 0.0, "lr": 5e-4},
    ]


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    ids = torch.randint(16, 480, (2, 12), generator=torch.Generator().manual_seed(steps))
    for _ in range(steps):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return pair(CONFIGS["biases"])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_state_is_that_of_the_hugging_face_model(
    make: Callable[[Any], Optimizer], config: PreTrainedConfig
) -> None:
    reference, model = pair(config)
    expected, actual = make(two_groups(reference)), make(two_groups(model))
    keep_in_transformers_layout(actual, model)
    for one, optimizer in ((reference, expected), (model, actual)):
        train(one, optimizer)
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    assert_close(ours["state"], theirs["state"])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_each_goes_on_from_the_others_state(config: PreTrainedConfig) -> None:
    reference, model = pair(config)
    expected, actual = AdamW(two_groups(reference)), AdamW(two_groups(model))
    keep_in_transformers_layout(actual, model)
    train(reference, expected)
    model.load_state_dict(reference.state_dict(), strict=False)
    actual.load_state_dict(copy.deepcopy(expected.state_dict()))
    again = copy.deepcopy(reference)
    fresh = AdamW(two_groups(again))
    fresh.load_state_dict(copy.deepcopy(actual.state_dict()))
    for one, optimizer in ((reference, expected), (model, actual), (again, fresh)):
        train(one, optimizer, steps=1)
    for optimizer in (actual, fresh):
        assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])
        steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
        assert len({step.data_ptr() for step in steps}) == len(steps)
        assert {step.item() for step in steps} == {3}


def test_reading_the_state_copies_no_moment_and_changes_nothing(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    _, model = models
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    keep_in_transformers_layout(optimizer, model)
    moments = {state["exp_avg"].untyped_storage().data_ptr() for state in optimizer.state.values()}
    read = optimizer.state_dict()
    assert {state["exp_avg"].untyped_storage().data_ptr() for state in read["state"].values()} == moments
    assert len(optimizer.param_groups[0]["params"]) == len(before["param_groups"][0]["params"])
    optimizer.load_state_dict(before)  # the own layout loads as well
    optimizer.load_state_dict(read)
    after = {name: optimizer.state[one] for name, one in model.named_parameters()}
    for number, state in enumerate(after.values()):
        torch.testing.assert_close(state, before["state"][number], atol=0, rtol=0)


def test_asking_twice_is_asking_once(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = models
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    keep_in_transformers_layout(optimizer, model)
    once = copy.deepcopy(optimizer.state_dict())
    keep_in_transformers_layout(optimizer, model)
    assert_close(optimizer.state_dict(), once)
    optimizer.load_state_dict(once)
    assert_close(optimizer.state_dict(), once)


def test_names_of_parameters_are_transformers(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    reference, model = models
    expected, actual = AdamW(reference.named_parameters()), AdamW(model.named_parameters())
    keep_in_transformers_layout(actual, model)
    assert actual.state_dict()["param_groups"] == expected.state_dict()["param_groups"]


def test_an_optimizer_without_states_yet(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    reference, model = models
    optimizer = AdamW(model.parameters())
    keep_in_transformers_layout(optimizer, model)
    expected = AdamW(reference.parameters()).state_dict()
    assert optimizer.state_dict() == expected
    optimizer.load_state_dict(expected)
    assert not optimizer.state


def test_frozen_parameters_are_left_out(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    states = []
    for model in models:
        model.requires_grad_(False)
        model.model.layers[1].requires_grad_(True)
        optimizer = AdamW([one for one in model.parameters() if one.requires_grad])
        keep_in_transformers_layout(optimizer, model)  # of a model that has nothing combined, the layout it has
        train(model, optimizer)
        states.append(optimizer.state_dict())
    assert len(states[0]["state"]) == 16
    assert_close(states[1], states[0])


def test_states_that_are_no_elements_pass_where_nothing_is_combined(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    states = []
    for model in models:
        optimizer = Adafactor([layer.mlp.down_proj.weight for layer in model.model.layers])
        keep_in_transformers_layout(optimizer, model)
        train(model, optimizer)
        states.append(optimizer.state_dict())
    assert_close(states[1], states[0])


# What does not fit


def test_states_of_rows_and_columns_are_refused(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    reference, model = models
    expected, actual = Adafactor(reference.parameters()), Adafactor(model.parameters())
    keep_in_transformers_layout(actual, model)
    for one, optimizer in ((reference, expected), (model, actual)):
        train(one, optimizer)
    with pytest.raises(StateDictError, match="go on with the same `combine`") as caught:
        actual.state_dict()
    assert ("shape", "row_var of model.layers.0.self_attn.qkv_proj.weight") in problems(caught.value)
    before = {one: copy.deepcopy(state) for one, state in actual.state.items()}
    with pytest.raises(StateDictError, match="cannot be translated") as caught:
        actual.load_state_dict(expected.state_dict())
    assert ("shape", "col_var of model.layers.1.mlp.gate_proj.weight") in problems(caught.value)
    assert all(torch.equal(state["step"], before[one]["step"]) for one, state in actual.state.items())


def test_every_part_without_a_state_or_with_another_step_is_named(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    reference, model = models
    expected, actual = AdamW(reference.parameters()), AdamW(model.parameters())
    keep_in_transformers_layout(actual, model)
    train(reference, expected)
    layer = reference.model.layers[0]
    del expected.state[layer.self_attn.k_proj.weight]
    expected.state[layer.mlp.up_proj.weight]["step"] += 1
    with pytest.raises(
        StateDictError, match=r"differs: 2.0 for model.*gate_proj.weight, 3.0 for model.*up_proj"
    ) as caught:
        actual.load_state_dict(expected.state_dict())
    qkv, gate_up = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
    assert problems(caught.value) == {
        ("partial", f"step of {qkv}"),
        ("partial", f"exp_avg of {qkv}"),
        ("partial", f"exp_avg_sq of {qkv}"),
        ("partial", f"step of {gate_up}"),
    }
    assert not actual.state


def test_a_state_of_another_model_is_refused(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = models
    optimizer = AdamW(two_groups(model))
    keep_in_transformers_layout(optimizer, model)
    with pytest.raises(StateDictError, match=r"have \[2\], expected \[16, 19\] .* as in transformers, or \[10, 13\]"):
        optimizer.load_state_dict(AdamW(nn.Linear(2, 2).parameters()).state_dict())


def test_an_optimizer_of_another_model_is_refused(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    reference, model = models
    with pytest.raises(ValueError, match="35 tensors of the AdamW are no parameters of this model"):
        keep_in_transformers_layout(AdamW(reference.parameters()), model)


def test_another_order_is_refused(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    _, model = models
    with pytest.raises(ValueError, match=r"not in the order of model\.parameters\(\)"):
        keep_in_transformers_layout(AdamW(list(model.parameters())[::-1]), model)
