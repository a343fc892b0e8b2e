"""Inputs and helpers for tests of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nrl_models.testing.case import FamilyCase


@torch.no_grad()
def logits_of_words(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return logits without those of padding tokens."""
    logits, words = model(**inputs).logits, inputs["attention_mask"].bool()
    return logits[words] if logits.shape[:2] == words.shape and logits.ndim == 3 else logits


def padded_batches(case: FamilyCase) -> list[dict[str, torch.Tensor]]:
    """Return two batches of two sequences. The second sequence is padded by five tokens: left, then right."""
    input_ids = case.inputs(images=False, length=14, seed=5)["input_ids"]
    batches = []
    for padding in (slice(5), slice(-5, None)):
        batch = {"input_ids": input_ids.clone(), "attention_mask": torch.ones_like(input_ids)}
        batch["input_ids"][1, padding] = batch["attention_mask"][1, padding] = 0
        batches.append(batch)
    return batches


def gradients_of(model: nn.Module, loss: Any) -> list[torch.Tensor]:
    """Return the gradient of each parameter. Unused parameters have zeros."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


@contextmanager
def embeddings_of(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Record the outputs of the model's embedding layer inside a `with` block, with gradients.

    Yields a list that receives one tensor `(batch, seq_len, hidden_size)` per call. Hooks the embedding layer, because
    some models accept no `inputs_embeds`, and some embed each document separately.
    """
    embedded: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output if output.requires_grad else output.requires_grad_())
        return output.clone()  # some models scale it in place

    with model.get_input_embeddings().register_forward_hook(keep):
        yield embedded


@contextmanager
def recomputed(case: FamilyCase) -> Iterator[None]:
    """Enable activation checkpointing inside a `with` block, unless the class declares that it does not support it."""
    model = case.model()
    if "activation checkpointing" in case.model_class.limits:
        yield
        return
    model.gradient_checkpointing_enable()
    for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
        layer.training = True  # only layers: complete models in training mode need more inputs, and use dropout
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


def pack(case: FamilyCase, rows: int = 1) -> dict[str, torch.Tensor]:
    """Pack the test documents, with position ids and an attention mask.

    Args:
        case: The class under test.
        rows: 1 packs all documents into one row. 2 puts the first document into the first row, padded on the right, and
            the other documents into the second row.
    """
    documents = documents_of(case)
    contents = [documents] if rows == 1 else [documents[:1], documents[1:]]
    length = max(sum(map(len, row)) for row in contents)
    shape = len(contents), length
    packed = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "position_ids", "attention_mask")}
    for row, inside in enumerate(contents):
        count = sum(map(len, inside))
        packed["input_ids"][row, :count] = torch.cat(inside)
        packed["attention_mask"][row, :count] = 1
        sizes = [*map(len, inside), length - count]
        packed["position_ids"][row] = torch.cat([torch.arange(size) for size in sizes])
    return {name: tensor.to(case.device) for name, tensor in packed.items()}


def documents_of(case: FamilyCase) -> list[torch.Tensor]:
    """Return three sequences of 7, 13 and 10 tokens."""
    rows = case.inputs(batch=3, length=13, images=False, seed=3)["input_ids"]
    return [row[:size] for row, size in zip(rows, (7, 13, 10), strict=True)]


def logits_alone(case: FamilyCase, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of each document in a separate run."""
    with torch.no_grad():
        return [case.model()(input_ids=document[None], use_cache=False).logits[0] for document in documents]
