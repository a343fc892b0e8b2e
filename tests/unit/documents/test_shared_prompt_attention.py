"""Attention of documents that continue a shared prompt: with masks, on a CPU, and with varlen kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nrl_models.common.documents import attention, masks
from nrl_models.common.documents.attention import attend
from nrl_models.common.documents.boundaries import DocumentBatches, Documents, sharing_prompts
from nrl_models.common.documents.current_documents import running

LENGTHS, PROMPTS = (9, 4, 6, 7, 3), (0, 5, 5, 0, 4)
POSITIONS = torch.cat([torch.arange(start, start + size) for start, size in zip(PROMPTS, LENGTHS, strict=True)])[None]
SIZE = sum(LENGTHS)
FIRST = (0, 0, 0, 19, 19)
"""The column at which each document's prompt begins."""


@pytest.fixture
def documents() -> Documents:
    with sharing_prompts():
        return Documents.from_positions(POSITIONS)


def in_batches(documents: Documents) -> Documents:
    return replace(documents, batches=DocumentBatches.of(documents))


def expected_mask(window: int | None) -> torch.Tensor:
    """Build the mask from its definition, one pair of tokens at each step."""
    mask = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    of = [number for number, size in enumerate(LENGTHS) for _ in range(size)]
    for query in range(SIZE):
        for key in range(query + 1):
            prompt = range(FIRST[of[query]], FIRST[of[query]] + PROMPTS[of[query]])
            distance = int(POSITIONS[0, query] - POSITIONS[0, key])
            mask[query, key] = (of[query] == of[key] or key in prompt) and (window is None or distance < window)
    return mask


def inputs(width: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, heads, SIZE, size).double() for heads, size in ((4, 16), (2, 16), (2, width)))


@pytest.mark.parametrize("window", [None, 1, 3, 6, 30])
@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("tile", [2, 1024])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "batches"])
def test_attention_matches_mask(
    window: int | None, width: int, tile: int, alone: bool, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE", tile)
    if not alone:
        documents = in_batches(documents)
    query, key, value = inputs(width)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=expected_mask(window), enable_gqa=True)
    torch.testing.assert_close(attend(query, key, value, documents, window=window).transpose(1, 2), expected)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_with_shared_prompts(window: int | None, attention: str, documents: Documents) -> None:
    masks.attend_by_document()
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    with running(documents):
        options = {"batch_size": 1, "q_length": SIZE, "kv_length": SIZE, "mask_function": function, "device": "cpu"}
        mask = ALL_MASK_ATTENTION_FUNCTIONS[attention](**options, dtype=torch.float32)
    sees = mask.built() if attention == "sdpa" else mask == 0
    assert torch.equal(sees[0, 0], expected_mask(window))


@pytest.mark.parametrize("window", [None, 4])
def test_batched_gradients_match_separate_documents(window: int | None, documents: Documents) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    weights = torch.randn(1, SIZE, 4, 16, dtype=torch.float64)
    found = []
    for each in (documents, in_batches(documents)):
        loss = (attend(*tensors, each, window=window) * weights).sum()
        found.append(torch.autograd.grad(loss, tensors))
    for alone_gradient, gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, alone_gradient)


def test_documents_of_similar_length_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (100, 40, 80, 75, 31, 74, 99, 30)
    documents = Documents.from_positions(torch.cat([torch.arange(length) for length in lengths])[None])
    batches = DocumentBatches.of(documents)
    assert batches.sizes == ((4, 100, 0), (1, 74, 0), (3, 40, 0))
    calls = []

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(tuple(query.shape))
        return scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    query = torch.randn(1, 2, sum(lengths), 8)
    found = attend(query, query, query, replace(documents, batches=batches))
    assert calls == [(4, 2, 100, 8), (1, 2, 74, 8), (3, 2, 40, 8)]
    torch.testing.assert_close(found, attend(query, query, query, documents))


def aligned(to_end: bool) -> Any:
    """A kernel for variable lengths that aligns queries with the last or the first keys."""

    def kernel(tensors: Any, boundaries: tuple[Any, ...], left: int, scale: float | None) -> torch.Tensor:
        starts, of_keys, longest, longest_keys = boundaries
        sizes, totals = starts.diff().tolist(), of_keys.diff().tolist()
        assert (longest, longest_keys) == (max(sizes), max(totals))
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors)
        parts = zip(query.split(sizes, 2), key.split(totals, 2), value.split(totals, 2), strict=True)
        found = []
        for part in parts:
            size, total = part[0].shape[2], part[1].shape[2]
            place = torch.arange(size)[:, None] + (total - size if to_end else 0)
            sees = torch.arange(total) <= place
            if left >= 0:
                sees &= torch.arange(total) >= place - left
            found.append(scaled_dot_product_attention(*part, attn_mask=sees, scale=scale, enable_gqa=True))
        return torch.cat(found, 2)[0].transpose(0, 1)

    return kernel


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("to_end", [True, False])
def test_varlen_kernels_with_shared_prompts(
    window: int | None, to_end: bool, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = inputs()
    expected = attend(query, key, value, documents, window=window)
    kernel, calls = aligned(to_end), []
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(args[0][0]))
        return kernel(*args)

    monkeypatch.setattr(attention, "_kernel", lambda: counted)
    torch.testing.assert_close(attend(query, key, value, documents, window=window), expected)
    assert calls == ([2, SIZE] if to_end else [2]), "kernels that align queries with the first keys are not used"


def test_flash_attention_receives_prompts_as_keys(documents: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    masks.attend_by_document()
    seen: dict[str, Any] = {}
    monkeypatch.setattr(masks, "flash_attention", lambda *args, **kwargs: seen.update(kwargs, args=args))
    options = {"batch_size": 1, "q_length": SIZE, "kv_length": SIZE, "device": "cpu"}
    function = masking_utils.causal_mask_function
    with running(documents):
        mask = ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"](**options, mask_function=function)
    query, key, value = inputs()
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"](None, query, key, value, mask)
    _, queries, keys, _, found = seen["args"]
    assert found is None
    assert (queries.shape[2], keys.shape[2]) == (SIZE, SIZE + sum(PROMPTS))
    assert (seen["max_length_q"], seen["max_length_k"]) == (9, 11)
    assert seen["cu_seq_lens_q"].diff().tolist() == list(LENGTHS)
    assert seen["cu_seq_lens_k"].diff().tolist() == [own + prompt for own, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    assert torch.equal(keys[:, :, 9 : 9 + 5], key[:, :, :5])
