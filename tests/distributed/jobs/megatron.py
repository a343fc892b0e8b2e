"""Compare Megatron-Core's GPT model, with weights in its layout, with our models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from jobs.setting import case_of
from nrl_models.errors import StateDictError
from nrl_models.family import FamilyModel
from nrl_models.megatron import layout
from nrl_models.megatron.gpt_model import LOCAL, build, load, logits, megatron_of, start_megatron
from nrl_models.megatron.gpt_settings import gpt_settings
from nrl_models.megatron.ranks import MegatronRank, Share
from nrl_models.megatron.trainer_parity import compare_megatron
from nrl_models.parity.parity_report import ParityRow
from nrl_models.testing.case import FamilyCase


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def levels(architecture: str, fault: str = "") -> list[ParityRow]:
    """Return parity's rows of Megatron's model. A fault is planted after the settings were verified."""
    start_megatron()
    case = case_of(architecture)
    model = case.model().eval()
    megatron = megatron_of(model)
    if fault:
        plant(megatron, fault)
    return compare_megatron(model, megatron, case.inputs(images=False)["input_ids"])


def plant(megatron: Any, fault: str) -> None:
    """Change Megatron's model of a dense decoder."""
    first, second = megatron.decoder.layers[:2]
    with torch.no_grad():
        if fault == "another epsilon":
            second.input_layernorm.eps = second.input_layernorm.variance_epsilon = 1e-2
        if fault == "a layer's weight stale":
            second.mlp.linear_fc2.weight.mul_(1.01)
        if fault == "gate and up exchanged":
            weight = first.mlp.linear_fc1.weight
            weight.copy_(torch.cat(list(weight.chunk(2))[::-1]))
        if fault == "an untrained head":
            weight = megatron.output_layer.weight
            megatron.output_layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)


def share_equals_ours(
    architecture: str, choices: Mapping[str, Any], computes: bool = True, *, tp: int = 1, pp: int = 1
) -> float:
    """Return the difference between Megatron's logits over two ranks and ours. 0 on a rank without logits."""
    start_megatron(tp, pp)
    case = case_of(architecture, {"num_hidden_layers": 2, "tie_word_embeddings": False})
    model = case.model()
    rank = dist.get_rank()
    megatron_rank = MegatronRank(
        tp=Share(rank % tp, tp), pp=Share(rank // tp, pp), transformer_engine=False, grouped_experts=False
    )
    settings, _ = gpt_settings(model.config, model.state_dict_adapter.layout(LOCAL), torch.float32)
    megatron = build(settings.reading(dict(choices)))
    assert load(megatron, model.state_dict_adapter, model.state_dict(), megatron_rank) == []
    if not computes:
        return 0.0
    input_ids = case.inputs(images=False)["input_ids"]
    with torch.no_grad():
        if megatron_rank.pp.index > 0:
            received = torch.empty(input_ids.shape[1], len(input_ids), model.config.hidden_size)
            dist.recv(received, src=rank - tp)
            megatron.set_input_tensor(received)
        actual = logits(megatron, input_ids)
        if megatron_rank.pp.index < pp - 1:
            dist.send(actual.contiguous(), dst=rank + tp)
            return 0.0
        return relative(actual, model(input_ids=input_ids, use_cache=False).logits)


def error_for(architecture: str) -> str:
    """Return the message for an unsupported model. Empty if it is supported."""
    start_megatron()
    return _error_message(case_of(architecture).model())


def error_for_fault(fault: str) -> str:
    """Return the message for a layout with a fault."""
    start_megatron()
    original = torch.cat

    def wrong(parts: Any, *args: Any, **options: Any) -> torch.Tensor:
        if args or options:
            return original(parts, *args, **options)  # not called by the layout
        by_group = len(parts) > 2
        if fault == "gate and up exchanged" and not by_group:
            parts = parts[::-1]
        if fault == "q, k, v not by group" and by_group:
            parts = [part for which in range(3) for part in parts[which::3]]
        if fault == "keys and values exchanged" and by_group:
            parts = [parts[index + (0, 1, -1)[index % 3]] for index in range(len(parts))]
        return original(parts)

    model = FamilyCase(case_of("LlamaForCausalLM").model_class, torch.device("cpu")).model()
    with mock.patch.object(layout.torch, "cat", wrong):
        return _error_message(model)


def _error_message(model: FamilyModel) -> str:
    try:
        megatron_of(model)
    except StateDictError as error:
        return str(error)
    return ""
