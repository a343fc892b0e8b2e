"""Layers that run each document separately, so that their state starts again with each document."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf
from transformers.utils import ModelOutput

from nrl_models import registry
from nrl_models.common.documents import layers
from nrl_models.common.documents.boundaries import Documents
from nrl_models.common.documents.current_documents import documents_running, running
from nrl_models.common.documents.layers import ByDocument, DecoderByDocument
from nrl_models.common.projections import CombinedProjections
from nrl_models.common.upstream import cache_in
from nrl_models.logprobs import token_logprobs
from nrl_models.logprobs.microbatches import RowLayout, layout_of
from nrl_models.testing.case import FamilyCase

ROWS = ((5, 1, 3, 3), (4, 4, 2, 2))
"""Document lengths by row. One has a single token. No length equals another dimension of the model."""
LENGTH = sum(ROWS[0])
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])


class Sum(nn.Module):
    """A layer whose state is the sum of all previous tokens. It returns the state, and records its arguments."""

    def forward(
        self, hidden_states: torch.Tensor, rotary: Any = None, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.received = rotary, mask, kwargs
        summed = hidden_states.cumsum(1)
        return summed, summed[:, -1]


class SumByDocument(ByDocument, Sum):
    """`Sum`, run separately for each document."""


@pytest.fixture(scope="module")
def case() -> FamilyCase:
    return FamilyCase(registry.model_class("Qwen3_5ForCausalLM"))


def test_state_resets_for_each_document() -> None:
    hidden = torch.randn(2, LENGTH, 3, dtype=torch.float64)
    documents = Documents.from_positions(POSITIONS)
    with running(documents):
        summed, state = SumByDocument()(hidden)
    expected = documents.join([part.cumsum(1) for part in documents.split(hidden)])
    assert torch.equal(summed, expected)
    assert torch.equal(state, expected[-1:, -1])
    assert not torch.allclose(summed, Sum()(hidden)[0])


def test_unpacked_batch_runs_once() -> None:
    hidden = torch.randn(2, LENGTH, 3)
    layer = SumByDocument()
    with running(None):
        assert torch.equal(layer(hidden, hidden, seq_idx=hidden)[0], hidden.cumsum(1))
    assert layer.received == (hidden, None, {"seq_idx": hidden})


def test_arguments_are_split_by_document() -> None:
    hidden, rotary = torch.randn(2, LENGTH, 3), torch.randn(1, LENGTH, 4)
    square = torch.randn(1, 1, LENGTH, LENGTH)
    sizes = torch.tensor([[7]])
    layer = SumByDocument()
    with running(Documents.from_positions(POSITIONS)):
        layer(hidden, (rotary, rotary), mask=hidden[..., 0], square=square, rows={"a": [hidden]}, sizes=sizes)
    (cos, sin), mask, others = layer.received
    assert torch.equal(cos, rotary[:, -2:])
    assert cos is not sin
    assert torch.equal(mask, hidden[1:, -2:, 0])
    assert torch.equal(others["rows"]["a"][0], hidden[1:, -2:])
    assert torch.equal(others["square"], square[..., -2:, -2:])
    assert others["sizes"] is sizes


def test_boundary_arguments_are_removed() -> None:
    hidden = torch.randn(2, LENGTH, 3)
    documents = Documents.from_positions(POSITIONS)
    layer = SumByDocument()
    with running(documents):
        layer(hidden, seq_idx=documents.index, cu_seq_lens_q=documents.cu_seqlens, max_length_q=4, left=1)
    assert layer.received[2] == {"left": 1}


class Stack(Sum):
    """A layer with the outputs of a decoder: hidden states of all layers, and router scores of all tokens."""

    def forward(self, hidden_states: torch.Tensor, attentions: Any = None) -> ModelOutput:  # type: ignore[override]
        summed, _ = super().forward(hidden_states)
        scores = (summed.flatten(0, 1),)
        return MoeModelOutputWithPast(summed, None, (hidden_states, summed), attentions, scores)


class StackByDocument(ByDocument, Stack):
    """`Stack`, run separately for each document."""


def test_decoder_outputs_are_joined() -> None:
    hidden = torch.randn(2, LENGTH, 3)
    documents = Documents.from_positions(POSITIONS)
    expected = documents.join([part.cumsum(1) for part in documents.split(hidden)])
    with running(documents):
        output = StackByDocument()(hidden)
        with pytest.raises(ValueError, match="output_attentions"):
            StackByDocument()(hidden, (hidden,))
    assert cache_in(output) is None
    torch.testing.assert_close(output.hidden_states, (hidden, expected))
    torch.testing.assert_close(output.router_logits, (expected.flatten(0, 1),))


class Counting(nn.Module):
    """A decoder that computes positions itself if none are passed."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        counted = torch.arange(input_ids.shape[1]) + 100 if position_ids is None else position_ids
        return input_ids + counted


class CountingByDocument(DecoderByDocument, Counting):
    """`Counting`, run separately for each document."""


def test_decoder_positions_restart_for_each_document() -> None:
    input_ids, decoder = torch.zeros_like(POSITIONS), CountingByDocument()
    with running(Documents.from_positions(POSITIONS)):
        assert torch.equal(decoder(input_ids), POSITIONS + 100)
        assert torch.equal(decoder(input_ids, POSITIONS), POSITIONS + 100)
        assert torch.equal(decoder(input_ids=input_ids, position_ids=POSITIONS + 7), POSITIONS + 7)
    assert torch.equal(decoder(input_ids, POSITIONS), POSITIONS)


def test_decoder_inputs_without_document_raise() -> None:
    input_ids, states = torch.zeros_like(POSITIONS), torch.zeros(2, LENGTH, 3)
    extra_inputs = {"encoder_hidden_states": states, "pixel_values": states[:, :5], "sizes": torch.zeros(1)}
    message = r"encoder_hidden_states \(2, 12, 3\), pixel_values \(2, 5, 3\), sizes \(1,\) are unknown"
    with running(Documents.from_positions(POSITIONS)), pytest.raises(ValueError, match=message):
        CountingByDocument()(input_ids, position_ids=POSITIONS, **extra_inputs)


def test_fsdp_decoder_with_documents_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document would gather the layers, and ranks may have different numbers of documents."""
    decoder = CountingByDocument()
    decoder.layer = nn.Linear(1, 1)
    monkeypatch.setattr(layers, "FSDPModule", nn.Linear)
    with running(Documents.from_positions(POSITIONS)), pytest.raises(ValueError, match="would deadlock"):
        decoder(torch.zeros_like(POSITIONS))
    decoder(torch.zeros_like(POSITIONS))


def test_rollout_layout_by_architecture() -> None:
    packs, alone = (registry.model_class(name) for name in ("LlamaForCausalLM", "BartForCausalLM"))
    assert layout_of(FamilyCase(packs).model()) is RowLayout.PACKED
    assert layout_of(FamilyCase(alone).model()) is RowLayout.PADDED


@pytest.mark.parametrize("architecture", ["BartForCausalLM", "RobertaForCausalLM", "Llama4ForCausalLM"])
@torch.no_grad()
def test_packed_logprobs_match_separate_documents(architecture: str) -> None:
    case = FamilyCase(registry.model_class(architecture))
    sequences = [row[:length] for row, length in zip(case.inputs(batch=4, length=9)["input_ids"], ROWS[0], strict=True)]
    expected = [token_logprobs(case.model(), sequence[None]).logprobs[0] for sequence in sequences]
    actual = token_logprobs(case.model(), torch.cat(sequences)[None], position_ids=POSITIONS[:1]).logprobs[0]
    torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_no_running_documents_inside_a_document() -> None:
    class ChecksDocuments(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            assert documents_running() is None
            return hidden_states

    class ChecksDocumentsByDocument(ByDocument, ChecksDocuments):
        pass

    hidden = torch.randn(2, LENGTH, 3)
    with running(Documents.from_positions(POSITIONS)):
        assert torch.equal(ChecksDocumentsByDocument()(hidden), hidden)
        assert documents_running() is not None


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "BambaForCausalLM", "Lfm2ForCausalLM"])
def test_padding_does_not_change_state(architecture: str) -> None:
    """Before 5.15, transformers' layers include padding in the state."""
    case = FamilyCase(registry.model_class(architecture))
    model, input_ids = case.model(), case.inputs(images=False, length=6)["input_ids"][:1]
    with torch.no_grad():
        alone = model(input_ids, use_cache=False).logits
        for before, after in ((3, 0), (0, 2)):
            mask = F.pad(torch.ones_like(input_ids), (before, after))
            logits = model(F.pad(input_ids, (before, after), value=7), attention_mask=mask, use_cache=False).logits
            found = logits[:, before : before + 6]
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def test_input_with_other_length_raises() -> None:
    with running(Documents.from_positions(POSITIONS)), pytest.raises(ValueError, match=r"SumByDocument .*\(2, 6, 3\)"):
        SumByDocument()(torch.randn(2, 6, 3))


def test_layer_classes_and_signature(case: FamilyCase) -> None:
    layer = case.model().model.layers[0].linear_attn
    assert isinstance(layer, ByDocument)
    assert isinstance(layer, CombinedProjections)
    assert isinstance(layer, hf.Qwen3_5GatedDeltaNet)
    assert inspect.signature(layer.forward) == inspect.signature(case.reference().model.layers[0].linear_attn.forward)


def alone(model: nn.Module, input_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits of each document in a separate forward."""
    documents = Documents.from_positions(POSITIONS).split(input_ids)
    return [model(input_ids=document, use_cache=False).logits for document in documents]


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of every parameter of the first layer."""
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.model.layers[0].parameters()]


def loss_of(logits: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([document.square().mean() for document in logits]).sum()


def packed(model: nn.Module, input_ids: torch.Tensor) -> list[torch.Tensor]:
    logits = model(input_ids=input_ids, position_ids=POSITIONS.to(input_ids.device)).logits
    return Documents.from_positions(POSITIONS).split(logits)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "recomputed", "recomputed reentrantly"])
def test_packed_gradients_match_separate_documents(case: FamilyCase, checkpointing: bool | None) -> None:
    model = case.new_pair()[1]
    input_ids = case.inputs(images=False, length=LENGTH)["input_ids"]
    expected = alone(model, input_ids)
    expected_gradients = gradients(model, loss_of(expected))
    if checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    actual = packed(model, input_ids)
    alone(model, input_ids)  # another forward before the backward pass
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # the logits have values of several units
    for ours, theirs in zip(gradients(model, loss_of(actual)), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copied_model_keeps_documents_apart(case: FamilyCase, copied: Any) -> None:
    input_ids = case.inputs(images=False, length=LENGTH)["input_ids"]
    with torch.no_grad():
        expected = packed(case.model(), input_ids)
        torch.testing.assert_close(packed(copied(case.model()), input_ids), expected)


@pytest.mark.long
def test_compiled_layer_keeps_documents_apart() -> None:
    """A compiler cannot read the running documents. It falls back to Python, or fails if one graph is required."""
    hidden, documents = torch.randn(2, LENGTH, 3), Documents.from_positions(POSITIONS)
    layer = SumByDocument()
    torch.compiler.reset()
    with running(documents), pytest.raises(Exception, match="ContextVar"):
        torch.compile(layer, backend="eager", fullgraph=True)(hidden)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(hidden)[0], hidden.cumsum(1))
        with running(documents):
            assert torch.equal(compiled(hidden)[0], layer(hidden)[0])
    torch.compiler.reset()
