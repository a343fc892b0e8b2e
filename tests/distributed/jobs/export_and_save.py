"""Whole tensors and plain checkpoints from sharded models."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaConfig

from jobs.memory import Peak
from jobs.setting import assert_same, case_of, full, local, mesh_of
from nrl_models import AutoModelForCausalLM, AutoModelForImageTextToText
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint, saving, shards, share_of


def exports_and_saves(architecture: str, folder: str, **sizes: int) -> None:
    """A sharded model exports, shows and saves exactly what one process does; and loads it back."""
    case = case_of(architecture)
    whole = copy.deepcopy(case.model())
    adapter = whole.state_dict_adapter
    reference = dict(adapter.iter_export(whole))
    model = parallelize(copy.deepcopy(whole), mesh_of(**sizes))
    for layout in ("hub", "transformers"):
        reference = dict(adapter.iter_export(whole, layout=layout))
        exported = list(model.state_dict_adapter.iter_export(model, max_bytes=300_000, layout=layout))
        assert [name for name, _ in exported] == list(reference)
        assert_same(dict(exported), reference)
        views = model.state_dict_adapter.hf_views(model, layout=layout)
        assert_same({name: full(view) for name, view in views.items()}, {name: reference[name] for name in views})
        gathered = {name: full(tensor) for name, tensor in model.state_dict().items()}
        assert_same(
            model.state_dict_adapter.to_hf(gathered, layout=layout), adapter.to_hf(whole.state_dict(), layout=layout)
        )
    assert list(gathered) == list(whole.state_dict())
    for name, parameter in model.named_parameters():
        assert torch.equal(share_of(parameter, gathered[name]), local(parameter)), name
    model.save_pretrained(folder, max_shard_size="700KB")
    if dist.get_rank() == 0:
        whole.save_pretrained(folder + "-whole", max_shard_size="700KB")
    dist.barrier()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    loaded = model.load_state_dict(whole.state_dict())  # whole tensors; every rank takes its shards
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
    assert_same(dict(model.state_dict_adapter.iter_export(model)), dict(adapter.iter_export(whole)))


def peak_of_export(**sizes: int) -> tuple[int, int]:
    """Memory that exporting takes on this rank, and the size of a bucket."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=16, vocab_size=1024,
                         num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
    torch.manual_seed(0)
    model = parallelize(AutoModelForCausalLM.from_config(config), mesh_of(**sizes))
    bucket = 8 * 2**20
    adapter = model.state_dict_adapter
    assert len(list(adapter.iter_export(model, max_bytes=2**20))) == len(
        adapter.hub
    )  # connections, and buffers of them
    with Peak() as peak:
        total = sum(tensor.nbytes for _, tensor in adapter.iter_export(model, max_bytes=bucket))
    assert total > 20 * bucket
    return peak.peak, bucket


def loads_and_saves(folder: str, again: str, **sizes: int) -> None:
    """Load, and save."""
    AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes)).save_pretrained(again)


def saves_as_one_process(folder: str, out: str, **sizes: int) -> None:
    """Load in shards, and load whole and shard; save each in both formats, and what one process makes of it."""
    whole = AutoModelForCausalLM.from_pretrained(folder)
    models = {
        "loaded": AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes)),
        "sharded": parallelize(AutoModelForCausalLM.from_pretrained(folder), mesh_of(**sizes)),
    }
    for original in (True, False):
        options = {"max_shard_size": "700KB", "save_original_format": original}
        for name, model in models.items():
            model.save_pretrained(f"{out}/{name}-{original}", **options)
        if dist.get_rank() == 0:
            whole.save_pretrained(f"{out}/whole-{original}", **options)
        dist.barrier()


def exports_the_checkpoint(folder: str, **sizes: int) -> None:
    """Load in shards, and load whole and shard: each exports and saves the checkpoint's own tensors."""
    tensors = load_file(f"{folder}/model.safetensors")
    models = {
        "loaded": AutoModelForImageTextToText.from_pretrained(folder, mesh=mesh_of(**sizes)),
        "sharded": parallelize(AutoModelForImageTextToText.from_pretrained(folder), mesh_of(**sizes)),
    }
    for name, model in models.items():
        assert_same(dict(model.state_dict_adapter.iter_export(model)), tensors)
        model.save_pretrained(f"{folder}/{name}")
        dist.barrier()
        assert_same(load_file(f"{folder}/{name}/model.safetensors"), tensors)
    save_checkpoint(f"{folder}/versions", models["loaded"])
    torch.manual_seed(0)
    new = parallelize(AutoModelForImageTextToText.from_config(models["loaded"].config), mesh_of(**sizes))
    assert new.state_dict_adapter.hub.keys() != tensors.keys()
    load_checkpoint(f"{folder}/versions", new)
    loaded = models["loaded"].state_dict()
    assert_same(
        {name: local(value) for name, value in new.state_dict().items()},
        {name: local(loaded[name]) for name in loaded},
    )


def saves(folder: str, fails: bool, **sizes: int) -> None:
    """Save; if asked to, fail where files are written."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))

    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with mock.patch.object(saving, "save_file", disk_full if fails else saving.save_file):
        model.save_pretrained(folder, max_shard_size="700KB")


def pushes(folder: str, **sizes: int) -> None:
    """Save with what a sharded model cannot."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    model.save_pretrained(folder, push_to_hub=True)


def dies_while_saving(folder: str, dying: int, **sizes: int) -> None:
    """One rank ends after the first files are written."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    if dist.get_rank() == dying:
        shards.dist = SimpleNamespace(all_reduce=lambda *_, **__: os._exit(3))  # type: ignore[assignment]
    model.save_pretrained(folder, max_shard_size="700KB")


def dies_while_exporting(dying: int, **sizes: int) -> None:
    """One rank ends between two buckets."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    for number, _ in enumerate(model.state_dict_adapter.iter_export(model, max_bytes=300_000)):
        if number == 3 and dist.get_rank() == dying:
            os._exit(3)
