"""Recorded expert choices are matched with the caller's tokens, although microbatches reorder them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from nrl_models import registry
from nrl_models.common.forward.routing import RoutingRecord, engine_routing, flip_rate, record_routing, replay_routing
from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs import rollout_batch, rollout_logprobs, token_logprobs
from nrl_models.testing.case import FamilyCase, randomize
from nrl_models.testing.tiny import tiny_config

LENGTHS = (5, 12, 9, 12, 7)
LONGEST = max(LENGTHS)


@pytest.fixture(scope="module", params=["packed", "padded"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return two models that choose different experts, whose microbatches are packed or padded."""
    torch.manual_seed(0)
    if request.param == "packed":
        model = FamilyCase(registry.model_class("Qwen3MoeForCausalLM")).model()
    else:
        model = MixtralForCausalLM._from_config(tiny_config(MixtralConfig)).eval()
        randomize(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "gate.weight" in name:
                parameter.neg_()
    return model, other


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(16, 200, (size,), generator=generator) for size in LENGTHS]


def batch_of(sequences: list[torch.Tensor], side: str = "right") -> dict[str, torch.Tensor]:
    """Return the inputs of a padded batch."""
    mask = pad_sequence([torch.ones_like(each) for each in sequences], True, padding_side=side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ids = pad_sequence(sequences, True, padding_side=side)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def recorded(model: PreTrainedModel, **inputs: torch.Tensor) -> RoutingRecord:
    with torch.no_grad(), record_routing(model) as record:
        model(**inputs, use_cache=False)
    return record


def replayed(
    model: PreTrainedModel, record: RoutingRecord, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probabilities from the model's own forward of a padded batch, and gradients of their sum."""
    model.zero_grad()
    ids, is_token = inputs["input_ids"], inputs["attention_mask"].bool()
    with replay_routing(model, record):
        logs = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    logs = torch.nn.functional.pad(logs * (is_token[:, 1:] & is_token[:, :-1]), (1, 0))
    logs.sum().backward()
    return logs.detach(), gradients_of(model)


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def engine_choices(model: PreTrainedModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the choices of an engine, `(tokens - 1, layers, experts per token)` for each sequence."""
    tables = []
    for sequence in sequences:
        record = recorded(model, input_ids=sequence[None])
        table = torch.zeros(len(sequence) - 1, model.config.num_hidden_layers, model.config.num_experts_per_tok)
        for name, choices in record.items():
            table[:, int(name.split(".")[2])] = choices[-1][:-1].float()
        tables.append(table.long())
    return tables


@pytest.mark.long
@pytest.mark.parametrize("chunk_size", [4, None])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_with_left_padding(
    pair: tuple[PreTrainedModel, PreTrainedModel],
    sequences: list[torch.Tensor],
    chunk_size: int | None,
    checkpointing: bool,
) -> None:
    model, other = pair[0], copy.deepcopy(pair[1])
    inputs = batch_of(sequences, "left")
    record = engine_routing(other, engine_choices(model, sequences), LONGEST, left=True)
    expected, gradients = replayed(other, record, inputs)
    if checkpointing:
        other.train().gradient_checkpointing_enable()
    other.zero_grad()
    with replay_routing(other, record):
        result = token_logprobs(
            other, inputs["input_ids"], attention_mask=inputs["attention_mask"], chunk_size=chunk_size
        ).logprobs
        result.sum().backward()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients_of(other), gradients, rtol=1e-3, atol=1e-4)
    del inputs["position_ids"]
    with record_routing(model) as record:
        token_logprobs(model, **inputs)
    assert flip_rate(record, recorded(model, **batch_of(sequences, "left"))) < 0.5  # only padding may differ
    is_token = inputs["attention_mask"].bool().flatten()
    for name, (choice,) in recorded(model, **batch_of(sequences, "left")).items():
        assert torch.equal(record[name][0].view(len(is_token), -1)[is_token], choice.view(len(is_token), -1)[is_token])


@pytest.mark.long
@pytest.mark.parametrize("layout", ["padded", "wide", "row", "engine", "rollouts"])
@pytest.mark.parametrize(
    "options",
    [{}, {"row_tokens": 14}, {"row_tokens": 24, "loss_terms": torch.tensor([0, 1, 0, 1, 2])}],
    ids=["one", "many", "pairs"],
)
def test_replay_in_rollouts(
    pair: tuple[PreTrainedModel, PreTrainedModel],
    sequences: list[torch.Tensor],
    layout: str,
    options: dict[str, Any],
) -> None:
    model, other = pair
    inputs = batch_of(sequences)
    record = recorded(model, **inputs)
    expected, gradients = replayed(other, record, inputs)
    if layout == "wide":
        wide = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in inputs.items()}
        record = recorded(model, **wide)
    elif layout == "row":
        is_token = inputs["attention_mask"].bool().flatten()
        record = {name: [choice.view(len(is_token), -1)[is_token]] for name, (choice,) in record.items()}
    elif layout == "engine":  # without the choice of the last token, whose output is not used
        record = engine_routing(other, engine_choices(model, sequences), LONGEST)
    elif layout == "rollouts":
        with record_routing(model) as record:
            rollout_logprobs(model, sequences, row_tokens=12)
    other.zero_grad()
    with replay_routing(other, record):
        result = rollout_logprobs(other, sequences, loss=lambda each: each.logprobs.sum(), **options)
        scored = rollout_logprobs(other, sequences, row_tokens=options.get("row_tokens"))
    torch.testing.assert_close(result.logprobs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scored.logprobs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients_of(other), gradients, rtol=1e-3, atol=1e-4)


def test_replay_in_one_rollout(pair: tuple[PreTrainedModel, PreTrainedModel], sequences: list[torch.Tensor]) -> None:
    model, other = pair
    sequence = sequences[1][None]
    record = recorded(model, input_ids=sequence)
    inputs = {"input_ids": sequence, "attention_mask": torch.ones_like(sequence)}
    expected, _ = replayed(other, record, inputs)
    for each in (
        record,
        recorded(model, **{name: torch.nn.functional.pad(value, (0, 3)) for name, value in inputs.items()}),
    ):
        with replay_routing(other, each):
            torch.testing.assert_close(rollout_logprobs(other, sequence.tolist()).logprobs, expected)


def test_recomputed_microbatches_use_recorded_experts(
    pair: tuple[PreTrainedModel, PreTrainedModel], sequences: list[torch.Tensor]
) -> None:
    """A loss that reads all sequences together runs microbatches twice."""
    model, other = pair[0], copy.deepcopy(pair[1])
    record = recorded(model, **batch_of(sequences))
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            other.train().gradient_checkpointing_enable()
        for row_tokens in (100, 14):
            other.zero_grad()
            with replay_routing(other, record):
                rollout_logprobs(other, sequences, loss=lambda each: each.logprobs.sum() ** 2, row_tokens=row_tokens)
            results.append(gradients_of(other))
    for gradients in results[1:]:
        torch.testing.assert_close(gradients, results[0], rtol=1e-3, atol=1e-2)


def test_rollout_record_matches_padded_batch(
    pair: tuple[PreTrainedModel, PreTrainedModel], sequences: list[torch.Tensor]
) -> None:
    model, other = pair
    inputs = batch_of(sequences)
    is_token = inputs["attention_mask"].bool().flatten()
    with record_routing(model) as record:
        for row_tokens in (100, 14):
            rollout_logprobs(model, sequences, row_tokens=row_tokens)
    for name, (choice,) in recorded(model, **inputs).items():
        (result,) = record[name]
        assert result.shape == choice.shape
        assert torch.equal(result.view(len(is_token), -1)[is_token], choice.view(len(is_token), -1)[is_token])
        assert (result.view(len(is_token), -1)[~is_token] == -1).all()
    with record_routing(other) as others:
        rollout_logprobs(other, sequences)
    name = next(iter(record))
    flipped = (record[name][0].sort(-1).values != others[name][0].sort(-1).values).any(-1)
    assert flip_rate({name: record[name]}, others) == pytest.approx(flipped.sum().item() / sum(LENGTHS))


def test_extra_microbatches_of_other_ranks_are_not_recorded(
    pair: tuple[PreTrainedModel, PreTrainedModel], sequences: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = pair
    plan = rollout_batch._plan

    def with_more(*args: Any) -> Any:
        parts, count = plan(*args)
        return parts, count + 2

    monkeypatch.setattr(rollout_batch, "_plan", with_more)
    record = recorded(model, **batch_of(sequences))
    expected, gradients = replayed(other, record, batch_of(sequences))
    other.zero_grad()
    with replay_routing(other, record), record_routing(other) as own:
        result = rollout_logprobs(other, sequences, loss=lambda each: each.logprobs.sum())
    torch.testing.assert_close(result.logprobs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients_of(other), gradients, rtol=1e-3, atol=1e-4)
    assert {choice.numel() // choice.shape[-1] for (choice,) in own.values()} == {len(LENGTHS) * LONGEST}


def test_mismatched_records_raise(
    pair: tuple[PreTrainedModel, PreTrainedModel], sequences: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    record = engine_routing(model, engine_choices(model, sequences), LONGEST, left=True)
    with replay_routing(model, record), pytest.raises(ValueError, match="expected the record of sequences padded on"):
        rollout_logprobs(model, sequences)
    record = recorded(model, **batch_of(sequences[:3]))
    with replay_routing(model, record), pytest.raises(ValueError, match="the sequences padded on the right, or in one"):
        rollout_logprobs(model, sequences)
    inputs = batch_of(sequences, "left")
    expected = token_logprobs(model, **inputs).logprobs
    monkeypatch.setattr(type(model), "limits", {"left padding": "it counts columns"}, raising=False)
    torch.testing.assert_close(token_logprobs(model, **inputs).logprobs, expected, rtol=1e-4, atol=1e-5)
    with record_routing(model), pytest.raises(UnknownArgumentError, match="attention_mask has padding on the left"):
        token_logprobs(model, **inputs)
    with replay_routing(model, recorded(model, **inputs)), pytest.raises(UnknownArgumentError, match="attention_mask"):
        token_logprobs(model, **inputs)
