"""Layers that share keys and values raise an error if checkpointing would lose their gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.common.forward.reentrant import layers_of_shared_keys
from nrl_models.errors import UnknownArgumentError
from nrl_models.families.gemma4.variants import E2B
from nrl_models.testing.case import FamilyCase


def wrapped(model: PreTrainedModel, impl: CheckpointImpl) -> PreTrainedModel:
    layers = tuple(model.get_decoder().layers)
    apply_activation_checkpointing(
        model, lambda module: checkpoint_wrapper(module, checkpoint_impl=impl), lambda module: module in layers
    )
    return model


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.train()(**inputs, use_cache=False)[0].square().sum().backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


SHARING: Mapping[str, Mapping[str, Any]] = {
    "Gemma3nForCausalLM": {},
    "Gemma4UnifiedForCausalLM": E2B,  # its row in the table does not declare that layers share
}


@pytest.fixture(params=SHARING)
def sharing(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    case = FamilyCase(registry.model_class(request.param), tiny=SHARING[request.param])
    assert any(layers_of_shared_keys(case.model()))
    return copy.deepcopy(case.model()), {"input_ids": case.inputs(images=False)["input_ids"]}


@pytest.mark.parametrize("changed", ["nothing", "copied", "pickled"])
def test_reentrant_wrappers_raise(sharing: tuple[PreTrainedModel, dict], changed: str) -> None:
    model, inputs = sharing
    if changed == "copied":
        model = copy.deepcopy(model)
    elif changed == "pickled":
        model = pickle.loads(pickle.dumps(model))
    wrapped(model, CheckpointImpl.REENTRANT)
    for run in (model, model.base_model, model.forward):
        with pytest.raises(UnknownArgumentError, match=r"CheckpointWrapper around .*NO_REENTRANT"):
            run(**inputs)
    with torch.no_grad():
        model(**inputs)


def test_non_reentrant_wrappers_keep_gradients(sharing: tuple[PreTrainedModel, dict]) -> None:
    model, inputs = sharing
    expected = gradients(copy.deepcopy(model), inputs)
    actual = gradients(wrapped(model, CheckpointImpl.NO_REENTRANT), inputs)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)


def test_reentrant_wrappers_without_kv_sharing(llama: PreTrainedModel) -> None:
    model: nn.Module = registry.model_class("LlamaForCausalLM").from_config(llama.config)
    inputs = {"inputs_embeds": torch.randn(1, 5, llama.config.hidden_size, requires_grad=True)}
    expected = gradients(copy.deepcopy(model), inputs)
    actual = gradients(wrapped(model, CheckpointImpl.REENTRANT), inputs)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)
