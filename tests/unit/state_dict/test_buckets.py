"""Buckets have the model's values. Their buffers are reused after use, and never overwritten while in use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.common.state_dict import buckets
from nrl_models.common.state_dict.buckets import (
    KEPT_BUFFERS,
    BufferPool,
    YieldedTensor,
    grouped,
    grouped_tensors,
    on_host,
    require_unchanged,
)
from nrl_models.common.views.view import HFTensor, Piece, View
from nrl_models.errors import EngineError
from nrl_models.testing.tiny import tiny_config

CPU = torch.device("cpu")
BUCKET = 300_000


def test_columns_of_one_matrix_do_not_overlap() -> None:
    """The rows of gate and up in one stack lie between each other. A write elsewhere changes the version of both."""
    flat = torch.zeros(100)
    matrix = flat[:32].view(4, 8)
    gate, up = YieldedTensor("gate", matrix[:, :4].t()), YieldedTensor("up", matrix[:, 4:].t())
    flat[64:80].fill_(1)
    require_unchanged([gate, up], "its layer was complete")
    part = YieldedTensor("part", matrix[2])
    with pytest.raises(EngineError, match=r"^gate was changed after"):
        require_unchanged([gate, part], "its layer was complete")


def test_freed_buffers_are_reused() -> None:
    pool = BufferPool(CPU)
    first = pool.take(1000)
    address = first.data_ptr()
    del first
    assert pool.take(800).data_ptr() == address


def test_buffers_in_use_are_not_reused() -> None:
    pool = BufferPool(CPU)
    first = pool.take(1000).fill_(1)
    view = first[10:20].view(torch.int16)
    del first
    for _ in range(5):
        pool.take(1000).fill_(2)
    assert (view == 257).all()
    del view
    gc.collect()
    addresses = {pool.take(1000).data_ptr() for _ in range(10)}
    assert len(addresses) <= KEPT_BUFFERS


def test_pool_returns_no_smaller_buffer() -> None:
    pool = BufferPool(CPU)
    pool.take(100)
    assert pool.take(1000).shape == (1000,)


def test_export_reuses_few_buffers(llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_config(llama.config, dtype=torch.float32)
    addresses = set()
    buckets = 0
    storage = 0
    for _, tensor in model.state_dict_adapter.iter_export(model, max_bytes=BUCKET):
        if tensor.untyped_storage().data_ptr() != storage:
            storage = tensor.untyped_storage().data_ptr()
            buckets += 1
            if tensor.untyped_storage().nbytes() <= BUCKET:
                addresses.add(storage)
    assert buckets > 6
    assert len(addresses) <= 6 < buckets


def test_retained_tensors_keep_their_values(llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_config(llama.config, dtype=torch.float32)
    kept = dict(model.state_dict_adapter.iter_export(model, max_bytes=BUCKET))
    expected = dict(model.state_dict_adapter.iter_export(model))
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())
    every_second = [
        (name, tensor)
        for number, (name, tensor) in enumerate(model.state_dict_adapter.iter_export(model, max_bytes=BUCKET))
        if number % 2
    ]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in every_second)


CONFIGS: dict[str, Any] = {
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "biases": (LlamaConfig, {"attention_bias": True, "vocab_size": 101}),
    "experts": (MixtralConfig, {}),
}


@pytest.mark.parametrize("max_bytes", [1, BUCKET, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_bucket_values_match_views(config: str, dtype: torch.dtype, max_bytes: int) -> None:
    config_class, changes = CONFIGS[config]
    model = AutoModelForCausalLM.from_config(tiny_config(config_class, changes), dtype=dtype)
    adapter = model.state_dict_adapter
    expected = dict(adapter.iter_export(model))
    assert ("lm_head.weight" in expected) is (config != "tied")
    for _ in range(3):
        received = {name: tensor.clone() for name, tensor in adapter.iter_export(model, max_bytes)}
        assert list(received) == list(expected)
        assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
        with torch.no_grad():  # the next export has other values, in the same buffers
            for parameter in model.parameters():
                parameter.add_(1)


def storage_addresses(stream: Iterable[tuple[str, torch.Tensor]]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for _, tensor in stream}


def test_next_export_reuses_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig))
    largest = max(tensor.nbytes for _, tensor in model.state_dict_adapter.iter_export(model))
    sizes: list[int] = []

    def empty(nbytes: int, dtype: Any) -> Any:
        sizes.append(nbytes)
        return actual(nbytes, dtype)

    actual = np.empty
    monkeypatch.setattr(buckets.np, "empty", empty)
    first = storage_addresses(model.state_dict_adapter.iter_export(model, max_bytes=largest))
    assert len(sizes) >= len(first) == KEPT_BUFFERS
    sizes.clear()
    for _ in range(2):
        assert storage_addresses(model.state_dict_adapter.iter_export(model, max_bytes=largest)) == first
    assert sizes == []


def test_buffers_are_freed_with_model() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig))
    for _, tensor in model.state_dict_adapter.iter_export(model, max_bytes=BUCKET):
        last = tensor
    pool = weakref.ref(buckets.pool_of(model, CPU))
    value = last.clone()
    del model, tensor
    gc.collect()
    assert pool() is None
    assert torch.equal(last, value)


def test_retained_tensor_outlives_later_exports() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(4):
        for name, tensor in model.state_dict_adapter.iter_export(model, max_bytes=BUCKET):
            if name.endswith(f"layers.{number % 2}.mlp.up_proj.weight"):
                kept.append((tensor, tensor.clone()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    assert len(kept) == 4
    assert all(torch.equal(tensor, value) for tensor, value in kept)


def test_consumer_of_buckets_needs_two_buffers() -> None:
    """An engine's loop variable has a bucket's list while the next bucket is made."""
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig, {"num_hidden_layers": 4}))
    largest = max(tensor.nbytes for _, tensor in model.state_dict_adapter.iter_export(model))
    exported = model.state_dict_adapter.iter_export(model, max_bytes=largest)
    addresses: set[int] = set()
    count = 0
    for bucket in grouped_tensors(exported, largest):
        addresses |= storage_addresses(bucket)
        count += 1
    assert count > 4
    assert len(addresses) == 2


def test_groups_are_full_and_in_order() -> None:
    sizes = [("a", 3), ("b", 4), ("c", 9), ("d", 1), ("e", 6), ("f", 1)]
    groups = [tuple(group) for group in grouped(sizes, 7)]
    assert groups == [("a", "b"), ("c",), ("d", "e"), ("f",)]
    assert [tuple(group) for group in grouped(sizes, None)] == [tuple("abcdef")]
    assert list(grouped([], 7)) == []


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (View("w").then("narrow", 0, 2, 4).then("transpose", 0, 1), (6, 4)),
        (View("w").then("reshape", 2, 4, 6).then("transpose", 0, 1).then("reshape", 8, 6), (8, 6)),
    ],
    ids=["strided", "reordered rows"],
)
def test_each_element_is_copied_once(view: View, shape: tuple[int, ...]) -> None:
    weight = torch.arange(48.0).view(8, 6)
    tensor = HFTensor("t", shape, (Piece(view),))
    whole = torch.full(shape, -1.0)
    for target, source in tensor.copies(whole, {"w": weight}):
        assert source.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()  # not a temporary copy
        assert target.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        target.copy_(source)
    assert torch.equal(whole, view.of(weight))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pieces_are_copied_into_their_regions(dim: int) -> None:
    """Covers reordered rows, a target region that is not contiguous, and padding."""
    weights = {"a": torch.randn(8, 6), "b": torch.randn(8, 2, 3)}
    rows = View("a").then("reshape", 2, 4, 6).then("transpose", 0, 1).then("reshape", 8, 2, 3)
    size = weights["b"].shape[dim]
    regions = [(("narrow", (dim, number * size, size)),) for number in range(2)]
    parts = [rows.of(weights["a"]), weights["b"], torch.zeros(8, 2, 3)]
    expected = torch.cat(parts, dim)
    tensor = HFTensor("t", tuple(expected.shape), (Piece(rows, regions[0]), Piece(View("b"), regions[1])))
    assert torch.equal(tensor.read(weights), expected)
    whole = torch.full_like(expected, -1.0)
    buckets.copy_all(list(tensor.copies(whole, weights)))
    assert torch.equal(whole, expected)


def test_gpu_tensors_are_copied_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a GPU: the tensors listed in `gpu` simulate GPU tensors."""
    tensors = {name: torch.randn(5, 7).to(dtype).T for name, dtype in zip("abcde", 5 * [torch.bfloat16], strict=True)}
    tensors |= {"f": torch.randn(3), "g": torch.empty(0, 2), "h": torch.tensor(3, dtype=torch.uint8)}
    gpu = {id(tensors[name]) for name in "abcdfgh"}
    monkeypatch.setattr(buckets, "_is_on_gpu", lambda tensor: id(tensor) in gpu)
    copies = {name: (tensor, tensor.clone()) for name, tensor in on_host(list(tensors.items()))}
    assert list(copies) == list(tensors)
    for name, (copied, value) in copies.items():
        assert copied.dtype == tensors[name].dtype
        assert torch.equal(copied, tensors[name]), name
        assert torch.equal(value, tensors[name]), name
        assert (copied is tensors[name]) is (name == "e")
        assert copied.is_contiguous() or name == "e"
