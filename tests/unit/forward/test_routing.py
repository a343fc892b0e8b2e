"""Recording and replaying the experts that routers choose."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy
import pytest
import torch
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.common.forward.routing import engine_routing, flip_rate, record_routing, replay_routing
from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs import token_logprobs
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

GATES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


@pytest.fixture
def other(mixtral: PreTrainedModel) -> PreTrainedModel:
    """Return the model with routers that choose other experts."""
    model = copy.deepcopy(mixtral)
    with torch.no_grad():
        for name in GATES:
            model.get_submodule(name).weight.neg_()
    return model


def test_record_routing_of_every_router(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
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


def test_record_keeps_only_last_call(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)
        mixtral(input_ids[:, :5])
    assert [tuple(choice.shape) for choices in record.values() for choice in choices] == [(10, 2)] * 2


def test_replay_of_own_record_keeps_logits(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        expected = mixtral(input_ids).logits
    with replay_routing(mixtral, record):
        assert torch.equal(mixtral(input_ids).logits, expected)
    assert "forward" not in mixtral.get_submodule(GATES[0]).__dict__


def test_replay_uses_recorded_experts_and_current_weights(
    mixtral: PreTrainedModel, other: PreTrainedModel, input_ids: torch.Tensor
) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)
    with record_routing(other) as before:
        other(input_ids)
    assert flip_rate(record, before) > 0.5
    weights = {}
    handle = other.get_submodule(GATES[0]).register_forward_hook(
        lambda *call: weights.update(given=call[1][0], routed=call[2])
    )
    with replay_routing(other, record):
        other(input_ids).logits.sum().backward()
    handle.remove()
    _, scores, indices = weights["routed"]
    assert torch.equal(indices, record[GATES[0]][0])
    logits = weights["given"] @ other.get_submodule(GATES[0]).weight.T
    expected = logits.softmax(-1).gather(-1, indices)
    torch.testing.assert_close(scores, expected / expected.sum(-1, keepdim=True))
    assert other.get_submodule(GATES[0]).weight.grad.abs().sum() > 0


def test_replay_during_recomputation(mixtral: PreTrainedModel, other: PreTrainedModel, input_ids: torch.Tensor) -> None:
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


def test_record_of_other_tokens_raises(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)
    with replay_routing(mixtral, record), pytest.raises(ValueError, match=r"gate makes choice 0 of shape \(10, 2\)"):
        mixtral(input_ids[:, :5])
    with pytest.raises(KeyError, match=r"lacks: model\.layers\.7"), replay_routing(mixtral, {"model.layers.7": []}):
        pass


def test_replay_on_unsupported_model_raises(
    mixtral: PreTrainedModel, input_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(mixtral), "limits", {"router replay": "it sorts scores by itself"}, raising=False)
    with (
        pytest.raises(ValueError, match="MixtralForCausalLM cannot be replayed: it sorts scores by itself"),
        replay_routing(mixtral, {}),
    ):
        mixtral(input_ids)


def test_flip_rate_counts_tokens_with_different_experts() -> None:
    first = {"gate": [torch.tensor([[0, 1], [2, 3], [0, 2], [1, 2]])]}
    second = {"gate": [torch.tensor([[1, 0], [2, 3], [0, 3], [1, 2]])]}
    assert flip_rate(first, second) == 0.25
    assert flip_rate({}, {}) == 0.0
    second["gate"][0][1] = -1  # no choice
    assert flip_rate(first, second) == flip_rate(second, first) == pytest.approx(1 / 3)


def test_dense_model_has_empty_record(llama: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(llama) as record:
        llama(input_ids)
    assert record == {}


def test_first_token_logprobs_call_uses_replay(
    mixtral: PreTrainedModel, other: PreTrainedModel, input_ids: torch.Tensor
) -> None:
    """The first call tests the model's head on a few tokens without recorded choices."""
    with record_routing(mixtral) as record, torch.no_grad():
        mixtral(input_ids)
    with replay_routing(other, record):
        actual = token_logprobs(other, input_ids).logprobs
        expected = other(input_ids).logits.log_softmax(-1)[:, :-1].gather(-1, input_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(actual[:, 1:], expected, rtol=1e-5, atol=1e-5)


def test_checks_are_not_recorded(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Neither the first call's test of the head on a few tokens, nor the search for routers."""
    model = copy.deepcopy(mixtral)
    with record_routing(model) as record, torch.no_grad():
        for _ in range(2):
            token_logprobs(model, input_ids)
            engine_routing(model, [torch.zeros(11, 2, 2)] * 2)
            assert [tuple(choice.shape) for choices in record.values() for choice in choices] == [(24, 2)] * 2


def test_recomputation_keeps_the_record(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    model = copy.deepcopy(mixtral).train()
    model.gradient_checkpointing_enable()
    with record_routing(model) as expected, torch.no_grad():
        model(input_ids, use_cache=False)
    with record_routing(model) as record:
        loss = model(input_ids, use_cache=False).logits.logsumexp(-1).sum()
        thread = threading.Thread(target=loss.backward)  # recomputation may run in another thread
        thread.start()
        thread.join()
    torch.testing.assert_close(record, expected)


# Choices reported by an engine


def as_an_engine_reports(model: PreTrainedModel, tokens: torch.Tensor, layers: int) -> numpy.ndarray:
    """Return choices as vLLM 0.32 reports them: `(tokens - 1, layers, experts per token)`, uint8, 0 without experts."""
    with record_routing(model) as record, torch.no_grad():
        model(tokens[:, :-1], use_cache=False)
    chosen = {int(name.split(".")[2]): choices[-1].reshape(tokens.shape[1] - 1, -1) for name, choices in record.items()}
    count = next(iter(chosen.values())).shape[-1]
    table = torch.zeros(tokens.shape[1] - 1, layers, count, dtype=torch.uint8)
    for layer, choice in chosen.items():
        table[:, layer] = choice
    return table.numpy()


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("left", [False, True])
def test_engine_routing_is_replayed(architecture: str, left: bool) -> None:
    """A batch of two lengths, on models with layers without experts or with groups of experts."""
    model_class = registry.model_class(architecture)
    torch.manual_seed(0)
    reference = model_class.reference_class()
    config = tiny_config(reference.config_class, model_class.tiny, reference)
    model = model_class.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    engine = copy.deepcopy(model)
    with torch.no_grad():  # the engine chooses other experts
        for name, tensor in engine.state_dict().items():
            if "gate." in name or "router." in name:
                tensor.neg_()
    rows = [torch.randint(16, 200, (1, size)) for size in (12, 7)]
    layers = config.num_hidden_layers
    routed = [as_an_engine_reports(engine, row, layers) for row in rows]
    assert routed[0].shape == (11, layers, routed[0].shape[2])
    length = 13
    batch = torch.zeros(2, length, dtype=torch.long)
    slices = [slice(length - row.shape[1], None) if left else slice(row.shape[1]) for row in rows]
    for line, slice_, row in zip(batch, slices, rows, strict=True):
        line[slice_] = row
    with record_routing(model) as recorded, torch.no_grad():
        model(batch, use_cache=False)
    record = engine_routing(model, routed, length, left=left)
    assert record.keys() == recorded.keys()
    assert [[c.shape for c in record[name]] for name in recorded] == [
        [c.shape for c in recorded[name]] for name in recorded
    ]
    taken = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):

            def note(_: Any, args: Any, keywords: Any, layer: int = int(name.split(".")[2])) -> None:
                taken[layer] = next(each for each in (*args, *keywords.values()) if not each.is_floating_point())

            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    with replay_routing(model, record), torch.no_grad():
        model(batch, use_cache=False)
    for handle in handles:
        handle.remove()
    for name in record:
        chosen = taken[int(name.split(".")[2])].reshape(2, length, -1)
        for line, slice_, table in zip(chosen, slices, routed, strict=True):
            expected = torch.from_numpy(table[:, int(name.split(".")[2])]).long()
            assert torch.equal(line[slice_][:-1], expected)
        first = name == next(iter(record))  # until the first different choice, the rest of the model chooses normally
        if first:
            last = record[name][-1].reshape(2, length, -1)[..., 0] < 0
            assert torch.equal(chosen[last], recorded[name][-1].reshape(2, length, -1)[last])


def test_mismatched_engine_routing_raises(mixtral: PreTrainedModel) -> None:
    fits = numpy.zeros((4, 2, 2), dtype=numpy.uint8)
    assert set(engine_routing(mixtral, [fits, fits[:2]])) == set(GATES)
    for routed, message in (
        ([], "expected"),
        ([fits[0]], "expected"),
        ([fits, fits[:, :1]], "with the same layers"),
        ([numpy.zeros((4, 1, 2))], "is in layer 1, and the engine has 1 layers"),
        ([numpy.zeros((4, 2, 3))], "no module of MixtralForCausalLM chooses 3 experts"),
        ([fits + 100], "chose expert 100 in layer 0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine_routing(mixtral, routed)
    with pytest.raises(ValueError, match="for 4 tokens of a sequence, but length is 3"):
        engine_routing(mixtral, [fits], 3)


def test_missing_engine_routing_raises(mixtral: PreTrainedModel) -> None:
    for routed in (None, [None]):
        with pytest.raises(UnknownArgumentError, match="start the engine with enable_return_routed_experts=True"):
            engine_routing(mixtral, routed)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "record=None: expected a record from record_routing"),
        ({GATES[0]: torch.zeros(10, 2)}, f"for {GATES[0]}: expected a list of tensors of integers"),
        ({GATES[0]: [torch.zeros(10, 2)]}, f"for {GATES[0]}: expected a list of tensors of integers"),
        ({GATES[0]: [None]}, f"record has \\[None\\] for {GATES[0]}"),
    ],
)
def test_values_that_are_not_records_raise(mixtral: PreTrainedModel, record: Any, message: str) -> None:
    with pytest.raises(UnknownArgumentError, match=message), replay_routing(mixtral, record):
        pass


def test_replay_of_unknown_experts_raises(mixtral: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with record_routing(mixtral) as record:
        mixtral(input_ids)
    experts = mixtral.config.num_local_experts
    record[GATES[1]][0][3, 1] = experts
    message = f"index {experts} in {GATES[1]}, which has {experts}"
    with replay_routing(mixtral, record), pytest.raises(ValueError, match=message):
        mixtral(input_ids)


def test_flip_rate_of_records_with_other_modules() -> None:
    record = {"gate": [torch.tensor([[0, 1]])]}
    for other in ({}, {"gate": []}):
        with pytest.raises(UnknownArgumentError, match="second has no choices for gate"):
            flip_rate(record, other)
    with pytest.raises(UnknownArgumentError, match="second=None"):
        flip_rate(record, None)
    assert flip_rate({}, record) == 0.0
