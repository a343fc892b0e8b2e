"""Bucket buffers are reused after use, and never overwritten while in use."""

from __future__ import annotations

import gc

import torch
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.common.state_dict.buckets import KEPT_BUFFERS, BufferPool

CPU = torch.device("cpu")
BUCKET = 300_000


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


def test_smaller_buffers_are_not_given() -> None:
    pool = BufferPool(CPU)
    pool.take(100)
    assert pool.take(1000).shape == (1000,)


def test_two_buffers_alternate_in_an_export(llama: PreTrainedModel) -> None:
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


def test_kept_tensors_keep_their_values(llama: PreTrainedModel) -> None:
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
