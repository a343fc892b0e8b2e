"""Tests of sequences: padded, packed, reordered, and decoded one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.documents.boundaries import sharing_prompts
from nrl_models.common.documents.packing import token_positions
from nrl_models.common.forward.routing import replay_routing
from nrl_models.common.upstream import cache_in, cache_input
from nrl_models.inputs.images import in_order
from nrl_models.inputs.model_inputs import first_text_token, vocabulary_size
from nrl_models.parity.noise import logits_and_routing, logits_of
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies_to, proves
from nrl_models.testing.suite.asserts import assert_close, assert_same_outcome
from nrl_models.testing.suite.conditions import (
    chooses_experts,
    generates,
    reads_what_it_writes,
    scores_every_token,
    shares_prompts,
    takes_text,
)
from nrl_models.testing.suite.sequence_inputs import (
    documents_of,
    embeddings_of,
    gradients_of,
    logits_alone,
    logits_of_words,
    pack,
    padded_batches,
    recomputed,
)


@pytest.mark.thorough
@proves("left padding")
@applies_to(scores_every_token, reads_what_it_writes)
def test_left_padding(family_case: FamilyCase) -> None:
    """Check that a sequence has the same logits when it runs separately and in a left-padded batch."""
    check_padding(family_case, lambda room, length: slice(room - length, None))


@pytest.mark.thorough
@proves("right padding")
@applies_to(reads_what_it_writes)
def test_right_padding(family_case: FamilyCase) -> None:
    """Check that a sequence has the same logits when it runs separately and in a right-padded batch."""
    check_padding(family_case, lambda room, length: slice(length))


def check_padding(case: FamilyCase, columns_for: Callable[[int, int], slice]) -> None:
    """Compare documents in one padded batch, each at `columns_for(room, length)`, with separate runs."""
    model, documents = case.model(), documents_of(case)
    room = max(len(document) for document in documents)
    input_ids = torch.zeros(len(documents), room, dtype=torch.long, device=case.device)
    mask = torch.zeros_like(input_ids)
    for row, document in enumerate(documents):
        where = columns_for(room, len(document))
        input_ids[row, where], mask[row, where] = document, 1
    position_ids = token_positions(mask)
    with torch.no_grad():
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
    for row, expected in enumerate(logits_alone(case, documents)):
        actual = logits[row] if logits.ndim == 2 else logits[row][mask[row].bool()]
        assert_close(actual, expected, scale=10)  # matmuls of other shapes sum in another order


@proves("logits")
@applies_to(takes_text)
def test_padded_batch(family_case: FamilyCase) -> None:
    """Compare a padded batch with the reference, with padding on either side, with and without position ids.

    If transformers' class does not run on text only, our class has to fail in the same way.
    """
    batches = padded_batches(family_case)
    if "position_ids" in inspect.signature(family_case.reference_class.forward).parameters:
        batches.append(batches[0] | {"position_ids": token_positions(batches[0]["attention_mask"])})
    for inputs in batches:
        assert_same_outcome(
            partial(logits_of_words, family_case.model(), inputs),
            partial(logits_of_words, family_case.reference(), inputs),
        )


@proves("packed sequences")
@applies_to(scores_every_token, reads_what_it_writes)
@pytest.mark.parametrize("mask", [None, "ones", "padded"])
def test_packing(family_case: FamilyCase, mask: str | None) -> None:
    """Check that sequences packed into one row with restarting positions have the same logits as in separate runs.

    The mask is missing, all ones, or marks padding at the end of the first of two rows.
    """
    packed = pack(family_case, rows=2 if mask == "padded" else 1)
    words = packed["attention_mask"].bool()
    if mask is None:
        del packed["attention_mask"]
    with torch.no_grad():
        logits = family_case.model()(**packed).logits[words]
    assert_close(logits, torch.cat(logits_alone(family_case, documents_of(family_case))), scale=10)


@pytest.mark.thorough
@proves("packed sequences")
@applies_to(scores_every_token, reads_what_it_writes)
@pytest.mark.parametrize("mask", [None, "ones"])
def test_base_models_keep_documents_apart(family_case: FamilyCase, mask: str | None) -> None:
    """Check that the base model, which trainers with fused heads call, keeps packed documents apart."""
    packed, base = pack(family_case), family_case.model().base_model
    if mask is None:
        del packed["attention_mask"]
    if not _takes_positions(base):
        return
    with torch.no_grad():
        hidden = base(**packed)[0][0]
        alone = [base(input_ids=document[None])[0][0] for document in documents_of(family_case)]
    assert_close(hidden, torch.cat(alone), scale=10)


def _takes_positions(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return "position_ids" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@pytest.mark.thorough
@proves("packed sequences")
@applies_to(scores_every_token, reads_what_it_writes)
def test_documents_get_no_gradient_from_each_other(family_case: FamilyCase) -> None:
    """Check that a document's loss has no gradient in another document's embeddings, also with checkpointing."""
    model, packed = family_case.model(), pack(family_case)
    last = len(documents_of(family_case)[-1])
    with recomputed(family_case), embeddings_of(model) as embedded:
        logits = model(**packed).logits
        gradients = torch.autograd.grad(logits[0, -last:].square().sum(), embedded, allow_unused=True)
    part_gradients = [
        torch.zeros_like(part) if gradient is None else gradient
        for part, gradient in zip(embedded, gradients, strict=True)
    ]
    length = packed["input_ids"].shape[1]
    *others, last_gradient = (
        part_gradients if len(part_gradients) > 1 else part_gradients[0].split([length - last, last], 1)
    )
    assert last_gradient.abs().sum() > 0
    assert all(other.abs().max() == 0 for other in others)


@pytest.mark.thorough
@proves("logits")
@applies_to(scores_every_token, reads_what_it_writes, shares_prompts)
def test_shared_prompts(family_case: FamilyCase) -> None:
    """Check that sequences with a shared prompt, which runs once, have the logits and gradients of separate runs.

    A family whose attention depends on the column in the row declares the limit "shared prompts" instead.
    """
    case, model = family_case, family_case.model()
    rows = case.inputs(batch=6, length=24, images=False, seed=3)["input_ids"]
    rows[1:3, :13], rows[4:, :9] = rows[0, :13], rows[3, :9]
    shared = (0, 13, 13, 0, 9, 9)
    sequences = [row[:size] for row, size in zip(rows, (20, 24, 15, 14, 22, 10), strict=True)]
    positions = [torch.arange(start, len(row)) for row, start in zip(sequences, shared, strict=True)]
    packed = torch.cat([row[start:] for row, start in zip(sequences, shared, strict=True)])[None]
    expected_logits = [row[start:] for row, start in zip(logits_alone(case, sequences), shared, strict=True)]
    with sharing_prompts():
        logits = model(input_ids=packed, position_ids=torch.cat(positions)[None].to(case.device)).logits[0]
    message = 'completions of a shared prompt have other logits, which a limit "shared prompts" declares'
    assert_close(logits, torch.cat(expected_logits), scale=10, message=message)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
    gradients = gradients_of(model, (logits * weights).sum())
    pieces = weights.split([len(each) for each in positions])
    separate = [
        model(input_ids=row[None], use_cache=False).logits[0, start:]
        for row, start in zip(sequences, shared, strict=True)
    ]
    expected = gradients_of(model, sum((row * piece).sum() for row, piece in zip(separate, pieces, strict=True)))
    bound = 2e-4 * max(gradient.abs().max().item() for gradient in expected)
    for actual, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=bound)


@pytest.mark.thorough
@proves("batch order")
def test_batch_order(family_case: FamilyCase) -> None:
    """Check that reordering the rows of a batch reorders the logits."""
    inputs = family_case.inputs(batch=3)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        expected = family_case.model()(**inputs, use_cache=False).logits[order]
        actual = family_case.model()(**in_order(inputs, order), use_cache=False)
    assert_close(actual.logits, expected, scale=10)


@pytest.mark.thorough
@proves("logits")
@applies_to(chooses_experts)
def test_tokens_choose_different_experts(family_case: FamilyCase) -> None:
    """Check that no router of the tiny model chooses the same experts for all tokens.

    Other tests would then not notice wrong choices.
    """
    _, routing = logits_and_routing(family_case.model(), family_case.inputs())
    assert routing or "router replay" in family_case.model_class.limits, "no choice of experts was recorded"
    for name, choices in routing.items():
        by_token = [choice.flatten(0, -2) for choice in choices if choice.ndim > 1]
        assert not by_token or any(len(choice.unique(dim=0)) > 1 for choice in by_token), name


@proves("router replay")
@applies_to(chooses_experts)
def test_router_replay(family_case: FamilyCase) -> None:
    """Check that replaying the chosen experts does not change the logits, and that other choices change them."""
    model, inputs = family_case.model(), family_case.inputs()
    expected, routing = logits_and_routing(model, inputs)
    assert routing, "no choice of experts was recorded"
    with replay_routing(model, routing):
        assert_close(logits_of(model, inputs), expected)
    others = {name: [choice.flip(0) for choice in choices] for name, choices in routing.items()}
    with replay_routing(model, others):
        assert (logits_of(model, inputs) - expected).abs().max() > 1e-3


@pytest.mark.thorough
@proves("cached decoding")
@applies_to(generates, reads_what_it_writes)
def test_cached_decode(family_case: FamilyCase) -> None:
    """Check that decoding token by token with a cache gives the logits of one complete forward."""
    model = family_case.model()
    input_ids = family_case.inputs(length=14, images=False)["input_ids"]
    with torch.no_grad():
        full = model(input_ids=input_ids, use_cache=False).logits
        output = model(input_ids=input_ids[:, :10], use_cache=True)
        steps = [output.logits]
        for token in range(10, 14):
            cache = cache_input(model.forward, cache_in(output))
            output = model(input_ids=input_ids[:, token : token + 1], use_cache=True, **cache)
            steps.append(output.logits)
    assert_close(torch.cat(steps, dim=1), full, scale=10)


@pytest.mark.thorough
@proves("generate")
@applies_to(generates)
def test_decoded_steps(family_case: FamilyCase) -> None:
    """Compare the logits of each step with a cache with the reference's, also after images and with encoders.

    If transformers' class does not support steps with a cache, our class has to fail in the same way.
    """
    inputs = family_case.inputs(length=12)
    assert_same_outcome(
        partial(decoded_steps, family_case.model(), inputs),
        partial(decoded_steps, family_case.reference(), inputs),
        scale=10,
    )


@torch.no_grad()
def decoded_steps(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
    """Return logits of a first forward, and of single tokens after it that use its cache."""
    prefix = "decoder_" if "decoder_input_ids" in inputs else ""
    # The encoder runs again, but the cache has its keys and values.
    again = {name: value for name, value in inputs.items() if not name.startswith(prefix)} if prefix else {}
    output = model(**inputs, use_cache=True)
    logits, vocabulary = [output.logits], vocabulary_size(model.config)
    for step in range(steps):
        token = (first_text_token(vocabulary) + 1 + step) % vocabulary
        word = torch.full_like(inputs[f"{prefix}input_ids"][:, :1], token)
        cache = cache_input(model.forward, cache_in(output))
        output = model(**again, **{f"{prefix}input_ids": word}, **cache, use_cache=True)
        logits.append(output.logits)
    return logits


@pytest.mark.thorough
@proves("generate")
@applies_to(generates)
def test_greedy_generation(family_case: FamilyCase) -> None:
    """Check that greedy `generate` selects the reference's tokens."""
    inputs = family_case.inputs(length=12)
    assert torch.equal(generated(family_case.model(), inputs, 8), generated(family_case.reference(), inputs, 8))


@pytest.mark.thorough
@proves("generate")
@applies_to(generates, takes_text)
def test_padded_generation(family_case: FamilyCase) -> None:
    """Check that `generate` selects the reference's tokens for left-padded sequences of different lengths.

    If transformers' class cannot generate from text only, our class has to fail in the same way.
    """
    inputs = padded_batches(family_case)[0]
    assert_same_outcome(
        partial(generated, family_case.model(), inputs, 4), partial(generated, family_case.reference(), inputs, 4)
    )


def generated(model: Any, inputs: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
    """Return `count` greedily generated tokens, after tokens of the input that the model repeats."""
    tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False, min_new_tokens=count)
    assert tokens.shape[1] >= count
    return tokens
