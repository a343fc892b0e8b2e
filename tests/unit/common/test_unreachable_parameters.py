"""Parameters that a loss does not depend on."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from nrl_models import unreachable_parameters
from nrl_models.families.llama.model import LlamaForCausalLM


@pytest.fixture
def model(llama_config: LlamaConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_config(llama_config).train()


def test_all_parameters_reachable(model: LlamaForCausalLM, input_ids: torch.Tensor) -> None:
    assert unreachable_parameters(model, lambda: model(input_ids, labels=input_ids).loss) == {}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_unreachable_parameters_have_reasons(
    model: LlamaForCausalLM, input_ids: torch.Tensor, checkpointing: bool
) -> None:
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.model.norm.weight.requires_grad_(False)
    first, second = model.model.layers
    second.mlp.forward = torch.zeros_like  # called, but without using its parameters
    first.self_attn.o_proj.register_forward_hook(lambda module, args, output: output.detach())
    reasons = unreachable_parameters(model, lambda: model(input_ids, labels=input_ids).loss)
    uncalled = "belongs to a module that is never called"
    detached = "is computed with, but the loss does not depend on it"
    assert reasons == {
        "model.norm.weight": "is frozen (requires_grad=False)",
        "model.layers.0.input_layernorm.weight": detached,
        "model.layers.0.self_attn.q_proj.weight": detached,
        "model.layers.0.self_attn.k_proj.weight": detached,
        "model.layers.0.self_attn.v_proj.weight": detached,
        "model.layers.0.self_attn.o_proj.weight": detached,
        "model.layers.1.post_attention_layernorm.weight": detached,
        "model.layers.1.mlp.down_proj.weight": uncalled,
        "model.layers.1.mlp.gate_proj.weight": uncalled,
        "model.layers.1.mlp.up_proj.weight": uncalled,
    }


def test_unreachable_parameters_have_no_gradient(model: LlamaForCausalLM, input_ids: torch.Tensor) -> None:
    model.model.layers[1].mlp.forward = torch.zeros_like
    reasons = unreachable_parameters(model, lambda: model(input_ids, labels=input_ids).loss)
    model(input_ids, labels=input_ids).loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == reasons.keys()


def test_loss_without_graph_raises(model: LlamaForCausalLM, input_ids: torch.Tensor) -> None:
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        unreachable_parameters(model, lambda: model(input_ids, labels=input_ids).loss)
