"""Masks are not built if attention can use document boundaries. Code that reads the mask receives a real one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nrl_models import AutoModelForCausalLM
from nrl_models.common.documents import attention
from nrl_models.common.documents.attention import attend
from nrl_models.common.documents.boundaries import DocumentBatches, Documents
from nrl_models.common.documents.current_documents import running
from nrl_models.common.documents.mask_functions import mask_parts
from nrl_models.common.documents.masks import DocumentMask, attend_by_document

LENGTHS = ((7, 13, 10), (20, 10))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
CONFIGS = {
    "causal": LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]),
    "window": MistralConfig(**SIZES, sliding_window=5, architectures=["MistralForCausalLM"]),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[request.param]), dtype=torch.float64)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[DocumentMask]:
    """Record the masks that were built."""
    output: list[DocumentMask] = []
    build = DocumentMask.built

    def note(mask: DocumentMask) -> torch.Tensor:
        output.append(mask)
        return build(mask)

    monkeypatch.setattr(DocumentMask, "built", note)
    return output


def registry_mask(
    attn_implementation: str = "sdpa", function: Any = masking_utils.causal_mask_function, **options: Any
) -> Any:
    """Create the mask of transformers' registry for a batch with these positions."""
    attend_by_document()
    arguments = {"batch_size": 2, "q_length": 30, "kv_length": 30, "q_offset": 0, "kv_offset": 0, "device": "cpu"}
    return ALL_MASK_ATTENTION_FUNCTIONS[attn_implementation](**(arguments | {"mask_function": function} | options))


@pytest.fixture
def packed() -> Iterator[Documents]:
    documents = Documents.from_positions(POSITIONS)
    with running(documents):
        yield documents


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_packed_rows_match_separate_documents(
    model: PreTrainedModel, checkpointing: dict | None, built: list[DocumentMask]
) -> None:
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    ids = torch.randint(64, (2, 30))
    alone = [
        model(document[None]).logits for row, sizes in zip(ids, LENGTHS, strict=True) for document in row.split(sizes)
    ]
    expected = torch.cat(alone, 1).view(2, 30, -1)
    logits = model(ids, position_ids=POSITIONS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    logits.square().sum().backward()
    output = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected.square().sum().backward()
    for actual, parameter in zip(output, model.parameters(), strict=True):
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-9, atol=1e-9)
    assert not built
    assert model.config._attn_implementation == "sdpa"


def test_packed_attention_is_bitwise_equal_to_separate_documents() -> None:
    query, key, value = (torch.randn(2, heads, 30, 16) for heads in (4, 2, 2))
    documents = Documents.from_positions(POSITIONS)
    output = attend(query, key, value, documents).transpose(1, 2)
    for part, *alone in zip(*(documents.split(tensor, 2) for tensor in (output, query, key, value)), strict=True):
        assert torch.equal(part, scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize("window", [None, 1, 3, 5, 13, 30])
@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "batches"])
def test_attention_matches_mask(window: int | None, width: int, alone: bool) -> None:
    # Includes values wider than keys, as in multi-head latent attention.
    shapes = ((2, 4, 30, 16), (2, 2, 30, 16), (2, 2, 30, width))
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    documents, place = Documents.from_positions(POSITIONS), torch.arange(30)
    mask = (documents.index[:, :, None] == documents.index[:, None]) & (place[:, None] >= place)
    if window is not None:
        mask &= place > place[:, None] - window
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=0.3, enable_gqa=True)
    if not alone:
        documents = replace(documents, batches=DocumentBatches.of(documents))
    output = attend(query, key, value, documents, window=window, scale=0.3)
    torch.testing.assert_close(output.transpose(1, 2), expected)


@pytest.mark.parametrize("window", [None, 5])
def test_varlen_kernel_receives_concatenated_rows(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(tensors: Any, boundaries: tuple[Any, ...], left: int, scale: float | None) -> torch.Tensor:
        starts, also, longest, longest_keys = boundaries
        assert torch.equal(starts, also)
        assert (starts.dtype, longest, longest_keys) == (torch.int32, 20, 20)
        assert left == (-1 if window is None else window - 1)
        sizes = starts.diff().tolist()
        parts = zip(*(tensor.transpose(0, 1)[None].split(sizes, 2) for tensor in tensors), strict=True)
        one = [
            attend(*part, Documents.from_positions(torch.arange(size)[None]), window=left + 1 or None, scale=scale)
            for size, part in zip(sizes, parts, strict=True)
        ]
        return torch.cat(one, 1)[0]

    query, key, value = (torch.randn(2, heads, 30, 16) for heads in (4, 2, 2))
    documents = Documents.from_positions(POSITIONS)
    expected = attend(query, key, value, documents, window=window)
    monkeypatch.setattr(attention, "_fits_kernel", lambda query, *others: len(query) == 2)
    monkeypatch.setattr(attention, "_kernel", lambda: kernel)
    torch.testing.assert_close(attend(query, key, value, documents, window=window), expected)


def test_mask_is_built_when_read(packed: Documents, built: list[DocumentMask]) -> None:
    mask = registry_mask()
    assert isinstance(mask, DocumentMask)
    assert (mask.shape, mask.dtype, mask.ndim, mask.device.type) == ((2, 1, 30, 30), torch.bool, 4, "cpu")
    assert mask[:, :, :, :30] is mask
    assert mask.detach().documents is packed
    assert not built
    place = torch.arange(30)
    expected = (packed.index[:, :, None] == packed.index[:, None]) & (place[:, None] >= place)
    assert torch.equal(mask[:, 0, 3:], expected[:, 3:])
    assert torch.equal(torch.where(mask, 1.0, 0.0), expected[:, None].float())
    query = torch.randn(2, 4, 30, 16)
    biased = scaled_dot_product_attention(query, query, query, attn_mask=~mask)  # another mask
    assert torch.equal(biased, scaled_dot_product_attention(query, query, query, attn_mask=~expected[:, None]))
    assert built


def test_torch_attention_with_mask_attends_by_document(packed: Documents, built: list[DocumentMask]) -> None:
    query = torch.randn(2, 4, 30, 16)
    output = scaled_dot_product_attention(query, query, query, attn_mask=registry_mask())
    assert torch.equal(output, attend(query, query, query, packed).transpose(1, 2))
    assert not built


@pytest.mark.parametrize(
    ("function", "documents", "window"),
    [
        (masking_utils.causal_mask_function, ((7, 13, 10), (20, 10)), None),
        (masking_utils.sliding_window_causal_mask_function(6), ((7, 13, 10), (20, 10)), 6),
        (
            masking_utils.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
            ((7, 8, 5, 8, 2), (8, 8, 4, 8, 2)),
            None,
        ),
        (
            masking_utils.and_masks(
                masking_utils.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
                masking_utils.sliding_window_overlay(3),
            ),
            ((7, 8, 5, 8, 2), (8, 8, 4, 8, 2)),
            3,
        ),
    ],
    ids=["causal", "window", "chunks", "chunks and window"],
)
def test_mask_function_determines_documents_and_window(
    function: Any, documents: tuple, window: int | None, packed: Documents
) -> None:
    mask = registry_mask(function=function)
    assert (mask.documents.lengths, mask.window) == (documents, window)
    assert registry_mask(attn_implementation="flash_attention_2", function=function).documents.lengths == documents


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_chunks_restart_with_each_document(attn_implementation: str, packed: Documents) -> None:
    """Independent of positions in the row: transformers 5.18 counts chunks from the start of the row."""
    chunks = masking_utils.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long))
    mask = registry_mask(attn_implementation, chunks)
    seen = mask == 0 if attn_implementation == "eager" else (mask * 1).bool()
    same = packed.index[:, :, None] == packed.index[:, None]
    chunk = POSITIONS // 8
    expected = same & (chunk[:, :, None] == chunk[:, None]) & torch.ones(30, 30, dtype=torch.bool).tril()
    assert torch.equal(seen[:, 0], expected)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_custom_mask_functions_keep_documents_apart(attn_implementation: str, packed: Documents) -> None:
    def odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query - key) % 2 == 0

    function = masking_utils.and_masks(masking_utils.causal_mask_function, odd)
    mask = registry_mask(attn_implementation, function, dtype=torch.float32)
    assert type(mask) is torch.Tensor
    place = torch.arange(30)
    apart = packed.index[:, :, None] == packed.index[:, None]
    expected = apart & (place[:, None] >= place) & ((place[:, None] - place) % 2 == 0)
    assert torch.equal(mask[:, 0] if attn_implementation == "sdpa" else mask[:, 0] == 0, expected)


@pytest.mark.parametrize(
    "other",
    [
        {"function": masking_utils.bidirectional_mask_function},  # the mask of a tower
        {"batch_size": 1},
        {"q_length": 29},
        {"kv_length": 31},
        {"attention_mask": torch.arange(60).view(2, 30) > 0},
    ],
    ids=lambda other: next(iter(other)),
)
def test_unrelated_masks_match_transformers(other: dict, packed: Documents) -> None:
    mask = registry_mask(**other)
    with running(None):
        expected = registry_mask(**other)
    assert type(mask) is type(expected)
    assert mask is None or torch.equal(mask, expected)


def test_mask_of_ones_is_ignored(packed: Documents) -> None:
    mask = registry_mask(attention_mask=torch.ones(2, 30, dtype=torch.bool))
    assert mask.documents is packed
    assert torch.equal(mask.built(), registry_mask().built())


def test_no_mask_without_packed_batch() -> None:
    assert registry_mask() is None
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__name__ == "sdpa_attention_forward"
    assert type(ALL_ATTENTION_FUNCTIONS)()["sdpa"].__module__.startswith("transformers.")  # the registered function


@pytest.mark.skipif(
    "position_bias" not in inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters, reason="transformers 5.5"
)
def test_position_bias_is_added_to_mask(packed: Documents, built: list[DocumentMask]) -> None:
    attend_by_document()
    query, bias = torch.randn(2, 4, 30, 16), torch.randn(1, 4, 30, 30)
    output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Module(), query, query, query, registry_mask(), position_bias=bias)
    place = torch.arange(30)
    sees = (packed.index[:, :, None] == packed.index[:, None]) & (place[:, None] >= place)
    mask = torch.where(sees[:, None], bias, float("-inf"))
    torch.testing.assert_close(
        output.transpose(1, 2), scaled_dot_product_attention(query, query, query, attn_mask=mask)
    )
    assert built


def test_flash_attention_receives_cu_seqlens(packed: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    from nrl_models.common.documents import masks

    call_arguments: dict[str, Any] = {}
    monkeypatch.setattr(masks, "flash_attention", lambda *args, **kwargs: call_arguments.update(kwargs, args=args))
    window = masking_utils.sliding_window_causal_mask_function(6)
    query = torch.randn(2, 4, 30, 16)
    attention = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    attention(None, query, query, query, registry_mask("flash_attention_2", window), scaling=0.5, softcap=3.0)
    assert call_arguments["args"][4] is None
    assert (
        call_arguments["max_length_q"],
        call_arguments["sliding_window"],
        call_arguments["scaling"],
        call_arguments["softcap"],
    ) == (20, 6, 0.5, 3.0)
    assert torch.equal(call_arguments["cu_seq_lens_q"], packed.cu_seqlens)
    assert torch.equal(call_arguments["cu_seq_lens_k"], packed.cu_seqlens)


def test_mask_parts() -> None:
    window = masking_utils.sliding_window_causal_mask_function(6)
    assert mask_parts(window) == {"sliding_window_overlay": {"sliding_window": 6}, "causal_mask_function": {}}
    either = masking_utils.or_masks(window, masking_utils.causal_mask_function)
    assert mask_parts(either).keys() == {"or_masks"}
    assert mask_parts(lambda *indices: True).keys() == {f"{__name__}.test_mask_parts"}
