"""Choices of experts, recorded and replayed."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import PreTrainedModel

from nrl_models.common.forward.routing import flip_rate, record_routing, replay_routing

GATES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


@pytest.fixture
def other(mixtral: PreTrainedModel) -> PreTrainedModel:
    """The same model with routers that choose otherwise."""
    model = copy.deepcopy(mixtral)
    with torch.no_grad():
        for name in GATES:
            model.get_submodule(name).weight.neg_()
    return model


def test_records_the_choices_of_every_router(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    chosen = {}
    handles = [
        mixtral.get_submodule(name).register_forward_hook(lambda *call, name=name: chosen.update({name: call[2][2]}))
        for name in GATES
    ]
    with record_routing(mixtral) as record:
        mixtral(input_ids)
    for handle in handles:
        handle.remove()
    assert list(record) == GATES
    for name in GATES:
        assert torch.equal(record[name][0], chosen[name])
        assert len(record[name]) == 1


def test_the_last_call_counts(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)
        mixtral(input_ids[:, :5])
    assert [tuple(choice.shape) for choices in record.values() for choice in choices] == [(10, 2)] * 2


def test_replaying_ones_own_choices_changes_nothing(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        expected = mixtral(input_ids).logits
    with replay_routing(mixtral, record):
        assert torch.equal(mixtral(input_ids).logits, expected)
    assert "forward" not in mixtral.get_submodule(GATES[0]).__dict__


def test_replayed_experts_are_the_recorded_ones_with_weights_of_ones_own(
    mixtral: PreTrainedModel, other: PreTrainedModel, input_ids: torch.Tensor
) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)
    with record_routing(other) as before:
        other(input_ids)
    assert flip_rate(record, before) > 0.5
    weights = {}
    handle = other.get_submodule(GATES[0]).register_forward_hook(lambda *call: weights.update(routed=call[2]))
    with replay_routing(other, record):
        other(input_ids).logits.sum().backward()
    handle.remove()
    logits, scores, indices = weights["routed"]
    assert torch.equal(indices, record[GATES[0]][0])
    expected = logits.float().softmax(-1).gather(-1, indices)
    torch.testing.assert_close(scores, expected / expected.sum(-1, keepdim=True))
    assert other.get_submodule(GATES[0]).weight.grad.abs().sum() > 0


def test_recomputation_replays_too(mixtral: PreTrainedModel, other: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)

    def gradients() -> dict[str, torch.Tensor]:
        other.zero_grad()
        loss = other(input_ids, use_cache=False).logits.logsumexp(-1).sum()
        thread = threading.Thread(target=loss.backward)  # recomputation may run in another thread
        thread.start()
        thread.join()
        return {name: parameter.grad for name, parameter in other.named_parameters()}

    other.train()
    with replay_routing(other, record):
        expected = gradients()
        other.gradient_checkpointing_enable()
        torch.testing.assert_close(gradients(), expected)


def test_a_record_of_other_tokens_is_refused(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)
    with replay_routing(mixtral, record), pytest.raises(ValueError, match=r"gate makes choice 0 of shape \(10, 2\)"):
        mixtral(input_ids[:, :5])
    with pytest.raises(KeyError, match=r"lacks: model\.layers\.7"), replay_routing(mixtral, {"model.layers.7": []}):
        pass


def test_replaying_is_refused_where_it_would_change_nothing(
    mixtral: PreTrainedModel, input_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(mixtral), "limits", {"router replay": "it sorts scores by itself"}, raising=False)
    with (
        pytest.raises(ValueError, match="MixtralForCausalLM cannot be replayed: it sorts scores by itself"),
        replay_routing(mixtral, {}),
    ):
        mixtral(input_ids)


def test_flip_rate_counts_tokens_whose_set_of_experts_differs() -> None:
    first = {"gate": [torch.tensor([[0, 1], [2, 3], [0, 2], [1, 2]])]}
    second = {"gate": [torch.tensor([[1, 0], [2, 3], [0, 3], [1, 2]])]}
    assert flip_rate(first, second) == 0.25
    assert flip_rate({}, {}) == 0.0


def test_a_dense_model_chooses_nothing(llama: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(llama) as record:
        llama(input_ids)
    assert record == {}
