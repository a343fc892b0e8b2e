"""Faults that a sweep must survive or detect."""

from __future__ import annotations

import os
import time
from unittest import mock

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from jobs import sweep
from jobs.setting import case_of, llama_case, mesh_of
from nrl_models.distributed import parallelize


def refuses() -> None:
    """Heads that ranks do not divide."""
    uneven = {"hidden_size": 258, "num_attention_heads": 6, "num_key_value_heads": 3}
    parallelize(llama_case(uneven).model(), mesh_of(tp=2))


def differs() -> list[object]:
    """Return the message for a wrong export, and the first words of the messages for wrong steps."""
    case, mesh = case_of("LlamaForCausalLM"), mesh_of(tp=2)
    _, model = case.new_pair()
    weights = dict(model.state_dict_adapter.iter_export(model))
    messages: list[object] = [
        sweep.different_tensors(weights | {"lm_head.weight": weights["lm_head.weight"] + 1e-7}, weights),
        sweep.different_tensors({name: tensor for name, tensor in weights.items() if "head" not in name}, weights),
    ]
    parallelize(model.train(), mesh)
    original = sweep.full_gradients
    small = "model.layers.0.self_attn.k_proj.weight"

    def message_for(change: object) -> str:
        model.zero_grad()
        with mock.patch.object(sweep, "full_gradients", lambda model: change(original(model))):
            return ", ".join(line.split()[0] for line in sweep.different_step(case, model, mesh))

    assert message_for(lambda gradients: gradients) == ""
    messages.append(
        message_for(lambda gradients: gradients | {small: gradients[small] * 2})
    )  # as if every rank held the complete sum
    with torch.no_grad():
        model.model.norm.weight.mul_(1.001)
    messages.append(message_for(lambda gradients: gradients))
    with torch.no_grad():
        model.model.norm.weight.div_(1.001)
    messages.append(message_for(lambda gradients: {name: value for name, value in gradients.items() if name != small}))
    return messages


def differs_by_more_than_rounding(architecture: str, name: str) -> list[str]:
    """Return the first words of the messages for a step over TP: as it is, and with a wrong gradient of a parameter."""
    case, mesh = case_of(architecture), mesh_of(tp=2)
    model = parallelize(case.new_pair()[1].train(), mesh)
    original, messages = sweep.full_gradients, []
    for factor in (1.0, 1.0003):

        def changed(model: PreTrainedModel, factor: float = factor) -> dict[str, torch.Tensor]:
            gradients = original(model)
            return gradients | {name: gradients[name] * factor}

        model.zero_grad()
        with mock.patch.object(sweep, "full_gradients", changed):
            messages.append(", ".join(line.split()[0] for line in sweep.different_step(case, model, mesh)))
    return messages


def ends() -> None:
    """One rank exits."""
    if dist.get_rank() == 1:
        os._exit(3)


def raises() -> None:
    """One rank raises."""
    if dist.get_rank() == 1:
        raise KeyError("lost")


def hangs(seconds: float) -> None:
    """One rank hangs."""
    if dist.get_rank() == 1:
        time.sleep(seconds)
