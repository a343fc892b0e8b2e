"""Running documents. Layers that are recomputed in a backward pass receive the same documents."""

from __future__ import annotations

import pickle
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from nrl_models.common.documents.boundaries import Documents
from nrl_models.common.documents.current_documents import documents_running
from nrl_models.common.documents.packing import keep_documents_apart

TWO_ROWS = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
ONE_DOCUMENT = torch.arange(6).expand(2, 6)


class Layer(nn.Module):
    """Scale hidden states by the document's number, and record the documents that each call receives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.received: list[Documents | None] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        documents = documents_running(self)
        self.received.append(documents)
        scale = 1 if documents is None else documents.index.float() + 2
        return hidden * self.weight * self.weight * scale


class Model(nn.Module):
    """A model that runs its layer through the checkpoint function stored on the layer, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = Layer()

    @keep_documents_apart
    def forward(self, hidden, attention_mask=None, position_ids=None, past_key_values=None):
        function = getattr(self.layer, "_gradient_checkpointing_func", None)
        return self.layer(hidden) if function is None else function(self.layer, hidden)


def checkpointed(mode: str) -> Model:
    model = Model()
    if mode == "wrapper":
        model.layer = checkpoint_wrapper(model.layer)
    elif mode != "none":
        model.layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=mode == "reentrant")
    return model


def received_documents(model: Model) -> list[Documents | None]:
    layer = model.layer
    return (layer._checkpoint_wrapped_module if isinstance(layer, CheckpointWrapper) else layer).received


def documents(positions: list, mask: list | None = None) -> Documents:
    return Documents.from_positions(torch.tensor(positions), None if mask is None else torch.tensor(mask))


@pytest.mark.parametrize(
    ("positions", "mask", "lengths"),
    [
        ([[0, 1, 2, 3]], None, ((4,),)),
        ([[0, 1, 0, 1]], None, ((2, 2),)),
        ([[0, 1, 0, 0]], None, ((2, 1, 1),)),
        ([[0, 1, 0, 0, 0]], [[1, 1, 1, 0, 0]], ((2, 1, 2),)),  # adjacent padding is one document
        ([[0, 1, 2, 3, 4]], [[1, 1, 1, 0, 0]], ((3, 2),)),
        ([[0, 0, 0, 1, 0]], [[0, 0, 1, 1, 1]], ((2, 2, 1),)),
        ([[0, 0, 0, 1, 0]], [[0, 1, 1, 1, 1]], ((1, 1, 2, 1),)),
        ([[0, 1, 0], [0, 1, 2]], None, ((2, 1), (3,))),
        ([[0, 1, 5, 0, 1]], [[1, 1, 0, 1, 1]], ((2, 1, 2),)),  # padding between documents
    ],
    ids=str,
)
def test_document_lengths_from_positions_and_mask(positions: list, mask: list | None, lengths: tuple) -> None:
    found = documents(positions, mask)
    assert found.lengths == lengths
    flat = [length for row in lengths for length in row]
    assert found.cu_seqlens.tolist() == [sum(flat[:count]) for count in range(len(flat) + 1)]
    assert found.cu_seqlens.dtype == found.index.dtype == torch.int32
    assert found.index.tolist() == [[number for number, size in enumerate(row) for _ in range(size)] for row in lengths]
    assert found.longest == max(flat)


@pytest.mark.parametrize("dim", [1, 2])
def test_split_and_join_round_trip(dim: int) -> None:
    found = Documents.from_positions(TWO_ROWS)
    tensor = torch.randn(2, *[6 if place == dim else 3 for place in (1, 2)])
    parts = found.split(tensor, dim)
    assert [part.shape[dim] for part in parts] == [3, 2, 1, 1, 5]
    assert parts[0].data_ptr() == tensor.data_ptr()
    assert torch.equal(found.join(parts, dim), tensor)


def test_unpacked_batch_has_no_documents() -> None:
    model = checkpointed("none")
    model(torch.ones(2, 6), position_ids=ONE_DOCUMENT)
    assert received_documents(model) == [None]
    assert documents_running() is None


@pytest.mark.parametrize("mode", ["none", "reentrant", "plain", "wrapper"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_recomputed_layers_receive_same_documents(mode: str, in_thread: bool) -> None:
    # Two batches before one backward pass, as with gradient accumulation or with a policy and its reference.
    model = checkpointed(mode)
    hidden = torch.arange(1.0, 13).view(2, 6).requires_grad_()
    losses = [model(hidden, position_ids=positions).sum() for positions in (TWO_ROWS, ONE_DOCUMENT)]
    packed, other = received_documents(model)
    assert packed is not None
    assert packed.lengths == ((3, 2, 1), (1, 5))
    assert other is None
    if in_thread:
        thread = threading.Thread(target=sum(losses).backward)
        thread.start()
        thread.join()
    else:
        sum(losses).backward()
    again = received_documents(model)[2:]
    assert sorted(map(id, again)) == ([] if mode == "none" else sorted((id(packed), id(None))))
    assert torch.equal(hidden.grad, packed.index + 3.0)


def test_pickle_of_model_with_wrapped_checkpoint_function() -> None:
    model = checkpointed("plain")
    for _ in range(2):
        model(torch.ones(2, 6, requires_grad=True), position_ids=TWO_ROWS)
    function = model.layer._gradient_checkpointing_func
    assert function.args[0].func is checkpoint  # wrapped only once, although it ran twice
    received_documents(model).clear()
    copied = pickle.loads(pickle.dumps(model))
    hidden = torch.ones(2, 6, requires_grad=True)
    copied(hidden, position_ids=TWO_ROWS).sum().backward()
    assert hidden.grad.unique().tolist() == [2, 3, 4]


@pytest.mark.parametrize("mode", ["reentrant", "plain", "wrapper"])
def test_checkpointing_after_packed_pass_without_gradients(mode: str) -> None:
    """Score a packed rollout, then train on padded sequences."""
    model = checkpointed(mode)
    with torch.no_grad():
        model(torch.ones(2, 6), position_ids=TWO_ROWS)
    hidden = torch.ones(2, 6, requires_grad=True)
    model(hidden).sum().backward()
    assert hidden.grad.unique().tolist() == [1]


@pytest.mark.parametrize("mode", ["reentrant", "plain"])
@pytest.mark.parametrize("positions", [TWO_ROWS, ONE_DOCUMENT, None], ids=["packed", "padded", "without positions"])
def test_checkpointing_after_new_checkpoint_function(mode: str, positions: torch.Tensor | None) -> None:
    model = checkpointed(mode)
    model(torch.ones(2, 6, requires_grad=True), position_ids=TWO_ROWS).sum().backward()
    model.layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=mode == "reentrant")
    hidden = torch.ones(2, 6, requires_grad=True)
    model(hidden, position_ids=positions).sum().backward()
    assert hidden.grad.unique().tolist() == ([2, 3, 4] if positions is TWO_ROWS else [1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_unsupported_checkpoint_function_raises(reentrant: bool) -> None:
    packed, other = checkpointed("none"), checkpointed("none")
    for model in (packed, other):
        plain = model.layer.forward
        model.layer.forward = partial(checkpoint, plain, use_reentrant=reentrant)
    hidden = torch.ones(2, 6, requires_grad=True)
    packed(hidden, position_ids=ONE_DOCUMENT).sum().backward()  # no packed batch so far
    loss = packed(hidden, position_ids=TWO_ROWS).sum()
    other(hidden, position_ids=ONE_DOCUMENT).sum().backward()  # no packed batch at all
    with pytest.raises(RuntimeError, match=r"Layer runs again .* its documents are unknown"):
        loss.backward()
