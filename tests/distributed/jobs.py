"""What the processes of a world do: each function runs on every rank."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, AutoModelForSequenceClassification, registry
from nrl_models.common import ProjectionPart
from nrl_models.distributed import (
    ParallelPlan,
    gathering,
    load_checkpoint,
    loading,
    parallelize,
    plan_for,
    save_checkpoint,
    saving,
)
from nrl_models.distributed import checkpoint as dcp_checkpoint
from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.testing.case import FamilyCase

LENGTH = 12


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh over all ranks, with named dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def case_of(architecture: str) -> FamilyCase:
    """The tiny model of a registered architecture."""
    return FamilyCase(registry.model_class(architecture), torch.device("cpu"))


def batches(case: FamilyCase, count: int) -> list[dict[str, Any]]:
    """One batch for each rank of `fsdp`."""
    return [case.inputs(batch=2, length=LENGTH, seed=seed, labels=True) for seed in range(count)]


def expected(case: FamilyCase, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process over all batches, by Hugging Face name."""
    model = copy.deepcopy(case.model()).train()
    losses = [model(**batch, use_cache=False).loss / count for batch in batches(case, count)]
    torch.stack(losses).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return sum(loss.item() for loss in losses), model.state_dict_adapter.to_hf(gradients)


def step(model: PreTrainedModel, case: FamilyCase) -> float:
    """One forward and backward on this rank's batch; the loss over all."""
    mesh = model.sharding.mesh
    batch = batches(case, size_of(mesh, "fsdp"))[rank_in(mesh, "fsdp")]
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def whole_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The gradients of a sharded model, whole, by Hugging Face name."""
    own = {name: one.grad.full_tensor() for name, one in model.named_parameters() if one.grad is not None}
    return model.state_dict_adapter.to_hf(own)


def equals_one_process(architecture: str, checkpointing: bool = False, **sizes: int) -> dict[str, float]:
    """How far loss and gradients of a sharded model are from one process's."""
    return _differences(case_of(architecture), checkpointing, sizes)


def llama_equals_one_process(config: dict[str, Any], combine: bool = True, **sizes: int) -> dict[str, float]:
    """The same for a Llama with other values in its configuration."""
    return _differences(llama_case(config, combine), False, sizes)


def llama_case(config: dict[str, Any], combine: bool = True) -> FamilyCase:
    """A tiny Llama with other values in its configuration, combined or not."""

    class Llama(registry.model_class("LlamaForCausalLM")):  # type: ignore[misc]
        tiny = config

    Llama.__name__ = Llama.__qualname__ = "LlamaForCausalLM"
    Llama.from_config = partial(Llama.from_config, combine=combine)  # type: ignore[method-assign]
    return FamilyCase(Llama, torch.device("cpu"))


def _differences(case: FamilyCase, checkpointing: bool, sizes: dict[str, int]) -> dict[str, float]:
    mesh = mesh_of(**sizes)
    loss, gradients = expected(case, size_of(mesh, "fsdp"))
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    if checkpointing:
        model.gradient_checkpointing_enable()
    actual = step(model, case)
    found = whole_gradients(model)
    assert sorted(found) == sorted(gradients)
    worst = max(float((found[name] - gradients[name]).abs().max()) for name in gradients)
    scale = max(float(one.abs().max()) for one in gradients.values())
    return {"loss": abs(actual - loss), "gradients": worst, "scale": scale}


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
    model.save_pretrained(folder, max_shard_size="700KB")
    if dist.get_rank() == 0:
        whole.save_pretrained(folder + "-whole", max_shard_size="700KB")
    dist.barrier()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    loaded = model.load_state_dict(adapter.to_hf(whole.state_dict()))
    assert not loaded.missing_keys
    assert_same(dict(model.state_dict_adapter.iter_export(model)), dict(adapter.iter_export(whole)))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and values bit for bit."""
    assert sorted(actual) == sorted(expected)
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different, different


def loads(folder: str, architecture: str, **sizes: int) -> dict[str, Any]:
    """Load a checkpoint sharded; it holds what one process loads, and computes the same."""
    case = case_of(architecture)
    mesh = mesh_of(**sizes)
    whole = case.model_class.from_pretrained(folder)
    model = case.model_class.from_pretrained(folder, mesh=mesh, plan="auto")
    assert not model.training
    for layout in ("hub", "transformers"):
        expected = dict(whole.state_dict_adapter.iter_export(whole, layout=layout))
        assert_same(dict(model.state_dict_adapter.iter_export(model, layout=layout)), expected)
    assert_same(dict(model.named_buffers()), dict(whole.named_buffers()))
    assert {name: one.dtype for name, one in model.named_parameters()} == dtypes_of(whole, model)
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None:
        tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
        assert (head.weight is words.weight) is tied
    inputs = case.inputs()
    with torch.no_grad():
        difference = (model(**inputs).logits - whole(**inputs).logits).abs().max().item()
    nbytes = sum(tensor.nbytes for tensor in whole.state_dict_adapter.to_hf(whole.state_dict()).values())
    return {"logits": difference, "read": model.sharding.loaded_bytes / nbytes}


def dtypes_of(whole: PreTrainedModel, model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The dtypes that a sharded model's parameters should have."""
    hf = {
        name: tensor.dtype
        for name, tensor in whole.state_dict_adapter.to_hf(whole.state_dict(), layout="transformers").items()
    }
    parts = model.state_dict_adapter.parts
    return {name: hf[parts[name][0]] for name, _ in model.named_parameters()}


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, case: FamilyCase, steps: range) -> list[float]:
    """Optimiser steps on batches that depend on the step alone; the loss of each."""
    losses = []
    for number in steps:
        optimizer.zero_grad()
        loss = model(**case.inputs(batch=2, length=LENGTH, seed=number, labels=True), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    """AdamW with two groups, as trainers make it: no decay for what has one dimension."""
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)


def train_and_save(folder: str, architecture: str, **sizes: int) -> list[float]:
    """Two steps, a checkpoint, and two more steps; all losses."""
    case = case_of(architecture)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    losses = train(model, optimizer, case, range(2))
    save_checkpoint(folder, model, optimizer, {"step": 2})
    return losses + train(model, optimizer, case, range(2, 4))


def resume(folder: str, architecture: str, combine: bool = True, **sizes: int) -> list[float]:
    """The two steps after the checkpoint, by a model that began with other weights."""
    case = case_of(architecture)
    torch.manual_seed(7)
    model = case.model_class.from_config(case.config, combine=combine).train()
    model = parallelize(model, mesh_of(**sizes))
    optimizer = new_optimizer(model)
    optimizer.param_groups[0]["lr"] = 7.0
    progress = load_checkpoint(folder, model, optimizer)
    assert progress == {"step": 2}
    assert optimizer.param_groups[0]["lr"] == 1e-3
    return train(model, optimizer, case, range(progress["step"], 4))


def accepts(architectures: list[str], **sizes: int) -> None:
    """A plan is found for each."""
    mesh = mesh_of(**sizes)
    for architecture in architectures:
        plan_for(case_of(architecture).model(), mesh)


def parts_are_dtensors(config: dict[str, Any], **sizes: int) -> None:
    """Each part's weight and bias: a DTensor of its Hugging Face tensor over a view of this rank's shard."""
    case = llama_case(config)
    whole, mesh = case.model(), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(whole), mesh)
    placed = {"fsdp": Shard(1), "tp": Shard(0)}
    for name, part in [(name, one) for name, one in model.named_modules() if isinstance(one, ProjectionPart)]:
        weight, bias = part.weight, part.bias
        assert weight.placements == tuple(placed[dim] for dim in sizes)
        assert (
            weight.to_local().untyped_storage().data_ptr()
            == part.combined.weight.to_local().untyped_storage().data_ptr()
        )
        assert torch.equal(weight.full_tensor(), whole.get_submodule(name).weight)
        if bias is not None:
            assert torch.equal(bias.full_tensor(), whole.get_submodule(name).bias)
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(part.combined.weight.full_tensor().sum(), 2 * part.combined.weight.full_tensor().sum() / 2)
        assert torch.equal(part.weight.full_tensor(), 2 * whole.get_submodule(name).weight)
        assert "bias=" in repr(part)
    combined = "model.layers.0.self_attn.qkv_proj.weight"
    single = dict(
        model.state_dict_adapter.convert_single_tensor_to_hf(combined, model.get_parameter(combined).full_tensor())
    )
    for part, tensor in single.items():
        assert torch.equal(tensor, 2 * whole.get_submodule(part.rpartition(".")[0]).weight)
    assert len(single) == 3


def trains_as_one_process(config: dict[str, Any], **sizes: int) -> float:
    """The largest difference of any weight after a few steps with clipping."""
    case = llama_case(config)
    whole = copy.deepcopy(case.model()).train()
    model = parallelize(copy.deepcopy(whole), mesh_of(**sizes))
    losses = [train(one, torch.optim.SGD(one.parameters(), lr=0.3), case, range(4)) for one in (whole, model)]
    assert losses[0][-1] != losses[0][0]
    expected = dict(whole.state_dict_adapter.iter_export(whole))
    moved = expected["model.layers.0.self_attn.k_proj.bias"] - case.model().model.layers[0].self_attn.k_proj.bias
    assert float(moved.detach().abs().max()) > 1e-6  # keys' biases have tiny gradients
    return max(float((one - expected[name]).abs().max()) for name, one in model.state_dict_adapter.iter_export(model))


def mixed_precision() -> dict[str, str]:
    """In which dtypes a model with fp32 weights keeps, computes and sums."""
    case, mesh = case_of("LlamaForCausalLM"), mesh_of(fsdp=2)
    model = copy.deepcopy(case.model()).train()
    parallelize(model, mesh, ParallelPlan(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: seen.append(str(attention.qkv_proj.weight.dtype)))
    step(model, case)
    parameter = attention.qkv_proj.weight
    return {"kept": str(parameter.dtype), "gradients": str(parameter.grad.dtype), "computed": seen[0]}


def generates_as_one_process(architecture: str, **sizes: int) -> None:
    """Greedy generation picks the same tokens."""
    case = case_of(architecture)
    inputs = case.inputs(length=8)
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    expected = case.model().generate(**inputs, **options)
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    assert torch.equal(model.generate(**inputs, **options), expected)


def plain_fully_shard() -> None:
    """Sharded along rows by somebody else: equal losses; parts say what they cannot do; whole state dicts convert."""
    case = case_of("Qwen2ForCausalLM")
    loss, gradients = expected(case, 2)
    model = copy.deepcopy(case.model()).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    batch = batches(case, 2)[dist.get_rank()]
    own = model(**batch, use_cache=False).loss
    own.backward()
    dist.all_reduce(total := own.detach().clone())
    assert abs(float(total) / 2 - loss) <= 1e-6
    part = model.model.layers[0].self_attn.k_proj
    with pytest.raises(RuntimeError, match=r"nrl_models\.distributed\.parallelize"):
        _ = part.weight
    assert "bias=True" in repr(model)
    adapter = case.model().state_dict_adapter
    found = adapter.to_hf(
        {name: one.grad.full_tensor() for name, one in model.named_parameters() if one.grad is not None}
    )
    assert max(float((found[name] - gradients[name]).abs().max()) for name in gradients) <= 1e-5


# Loading


def loads_over(folder: str, sizes: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    """Load over a mesh with any names, or none."""
    AutoModelForCausalLM.from_pretrained(folder, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))


def loads_plainly(folder: str, plan: Any = "auto", **sizes: int) -> None:
    """Load over a mesh; the rank has not allocated anything if that fails."""
    AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes), plan=plan)


def loads_differently(folders: list[str], **sizes: int) -> None:
    """Each rank loads another folder."""
    loads_plainly(folders[dist.get_rank()], **sizes)


def shards_what_differs(**sizes: int) -> None:
    """Each rank has other weights."""
    model = copy.deepcopy(case_of("LlamaForCausalLM").model())
    with torch.no_grad():
        model.model.norm.weight.add_(dist.get_rank())
    parallelize(model, mesh_of(**sizes))


def dies_while_loading(folder: str, dying: int, **sizes: int) -> None:
    """One rank ends where it reads."""
    if dist.get_rank() == dying:
        loading._fill = lambda *_: os._exit(3)  # type: ignore[assignment]
    loads_plainly(folder, **sizes)


def anonymous() -> int:
    """This process's memory that no file backs, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Peak:
    """The largest rise of a process's anonymous memory while open."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or what earlier jobs freed would be taken again, unseen
        self.base, self.peak, self.done = anonymous(), 0, False
        self.watcher = threading.Thread(target=self._watch)
        self.watcher.start()
        return self

    def _watch(self) -> None:
        while not self.done:
            self.peak = max(self.peak, anonymous() - self.base)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.done = True
        self.watcher.join()


def peak_of_loading(folder: str, **sizes: int) -> int:
    """Memory that loading takes on this rank, at most."""
    mesh = mesh_of(**sizes)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), device="meta")  # imports
    with Peak() as peak:
        model = AutoModelForCausalLM.from_pretrained(folder, mesh=mesh)
    del model
    return peak.peak


def loads_classifier(folder: str, **sizes: int) -> dict[str, Any]:
    """A classifier on a language model's body: its head is new, and the same on all ranks."""
    torch.manual_seed(dist.get_rank())
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, mesh=mesh_of(**sizes), strict=False, num_labels=6
    )
    weights = dict(model.state_dict_adapter.iter_export(model))
    whole = AutoModelForCausalLM.from_pretrained(folder)
    expected = whole.state_dict_adapter.to_hf(whole.state_dict())
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, weights["score.weight"])
    return {
        "std": float(weights["score.weight"].std()),
        "same": all(torch.equal(one, seen[0]) for one in seen),
        "body": all(torch.equal(one, expected[name]) for name, one in weights.items() if name != "score.weight"),
    }


# Export and save


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


def dies_while_saving(folder: str, dying: int, checkpoint: bool = False, **sizes: int) -> None:
    """One rank ends after the first files are written."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    if dist.get_rank() == dying:
        gathering.dist = SimpleNamespace(all_reduce=lambda *_, **__: os._exit(3))  # type: ignore[assignment]
        dcp_checkpoint.dcp = SimpleNamespace(save=lambda *_, **__: os._exit(3))  # type: ignore[assignment]
    if checkpoint:
        save_checkpoint(folder, model)
    else:
        model.save_pretrained(folder, max_shard_size="700KB")


def dies_while_exporting(dying: int, **sizes: int) -> None:
    """One rank ends between two buckets."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    for number, _ in enumerate(model.state_dict_adapter.iter_export(model, max_bytes=300_000)):
        if number == 3 and dist.get_rank() == dying:
            os._exit(3)


# Checkpoints


def resume_without_optimizer(folder: str, **sizes: int) -> list[float]:
    """Go on with the weights alone."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(case.model_class.from_config(case.config).train(), mesh_of(**sizes))
    load_checkpoint(folder, model)
    return train(model, new_optimizer(model), case, range(2, 4))


def dies_while_resuming(folder: str, dying: int, **sizes: int) -> None:
    """One rank ends when all have agreed that the checkpoint fits."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    if dist.get_rank() == dying:
        dcp_checkpoint.dcp = SimpleNamespace(load=lambda *_, **__: os._exit(3))  # type: ignore[assignment]
    load_checkpoint(folder, model, optimizer)


def resume_with_one_group(folder: str, **sizes: int) -> None:
    """An optimiser that was made otherwise."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))


def names_in_checkpoint(folder: str) -> dict[str, list[str]]:
    """The tensors of its two parts."""
    readers = {
        "model": HuggingFaceStorageReader(f"{folder}/model"),
        "optimizer": FileSystemReader(f"{folder}/optimizer"),
    }
    return {kind: list(reader.read_metadata().state_dict_metadata) for kind, reader in readers.items()}


# Integrations


def trains_lora(checkpoint: str, adapter: str, **sizes: int) -> list[str]:
    """Train a LoRA on a sharded base model and save it; the names in its file."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, model)
    parallelize(model, mesh_of(**sizes))
    trainable = [one for one in model.parameters() if one.requires_grad]
    assert trainable
    assert all("lora" in name for name, one in model.named_parameters() if one.requires_grad)
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = train(model, optimizer, case_of("LlamaForCausalLM"), range(4))
    assert losses[-1] != losses[0]
    state = peft.get_peft_model_state_dict(model, {name: full(one) for name, one in model.state_dict().items()})
    if dist.get_rank() == 0:
        config.save_pretrained(adapter)
        save_file(
            {f"base_model.model.{name}": one for name, one in state.items()}, f"{adapter}/adapter_model.safetensors"
        )
    dist.barrier()
    return list(state)


def compiled_layers_equal_one_process(architecture: str, **sizes: int) -> dict[str, float]:
    """As `equals_one_process`, each decoder layer compiled by itself."""
    case, mesh = case_of(architecture), mesh_of(**sizes)
    loss, gradients = expected(case, size_of(mesh, "fsdp"))
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=count)
    actual = step(model, case)
    found = whole_gradients(model)
    torch.compiler.reset()
    worst = max(float((found[name] - gradients[name]).abs().max()) for name in gradients)
    return {"loss": abs(actual - loss), "gradients": worst, "graphs": len(graphs)}


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Towards the orthogonal matrix nearest to a gradient, by Newton-Schulz steps, as Muon's (Jordan et al., 2024)."""
    matrix = matrix / matrix.norm()
    for _ in range(5):
        matrix = 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
    return matrix


def muon_on_parts(**sizes: int) -> tuple[float, float]:
    """How far updates of parts are from those of the uncombined model's matrices; and those of whole combined ones."""
    case = case_of("LlamaForCausalLM")
    reference = copy.deepcopy(case.reference()).train()
    reference(**batches(case, 1)[0], use_cache=False).loss.backward()
    expected = {name: orthogonalised(one.grad) for name, one in reference.named_parameters() if "_proj" in name}
    model = copy.deepcopy(case.model()).train()
    if sizes:
        parallelize(model, mesh_of(**sizes))
    adapter = model.state_dict_adapter
    model(**batches(case, 1)[0], use_cache=False).loss.backward()
    worst, combined = 0.0, 0.0
    for name, parameter in model.named_parameters():
        gradient = full(parameter.grad)
        parts = [(part, view) for part, view in adapter.parts_of(name) if part in expected]
        for part, view in parts:
            worst = max(worst, float((orthogonalised(view.of(gradient)) - expected[part]).abs().max()))
            if len(parts) > 1:
                together = view.of(orthogonalised(gradient))
                combined = max(combined, float((together - expected[part]).abs().max()))
    return worst, combined


def sharded_example(*arguments: str) -> list[float]:
    """`examples/sharded.py`, in this world's process group."""
    import sharded

    losses = sharded.main(list(arguments))
    torch.compiler.reset()
    return losses


# Estimates


def measures(architecture: str, batch: int, length: int, **sizes: int) -> dict[str, Any]:
    """Bytes this rank holds after a step, that autograd keeps in a forward, and that are sent."""
    case = case_of(architecture)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = case.inputs(batch=batch, length=length)["input_ids"]
    kept: dict[int, int] = {}
    parameters = {local(one).untyped_storage().data_ptr() for one in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Sent(model.sharding.mesh) as sent:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), tokens.flatten())
        loss.backward()
    optimizer.step()
    states = [one for state in optimizer.state.values() for one in state.values() if one.ndim > 0]
    return {
        "parameters": sum(local(one).nbytes for one in model.parameters()),
        "gradients": sum(local(one.grad).nbytes for one in model.parameters()),
        "optimizer": sum(local(one).nbytes for one in states),
        "buffers": sum(one.nbytes for one in model.buffers()),
        "activations": sum(kept.values()),
        "traffic": sent.nbytes,
    }


class Sent(TorchDispatchMode):
    """Bytes this rank sends while open, by dimension of the mesh, each collective being a ring."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.names = {mesh.get_group(dim).group_name: (name,) for dim, name in enumerate(mesh.mesh_dim_names)}
        self.sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        self.nbytes = dict.fromkeys(mesh.mesh_dim_names, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):  # FSDP's: (output, input, ...)
            self.nbytes["fsdp"] += min(args[0].nbytes, args[1].nbytes) * (self.sizes["fsdp"] - 1)
        elif name.startswith("_c10d_functional::") and not ("wait" in name or "wrap" in name):
            groups = [self.names[one] for one in args if isinstance(one, str) and one in self.names]
            # A group of all dimensions together, which torch makes once something has flattened such a mesh: it does
            # what one collective a dimension would do.
            for dim in groups[0] if groups else tuple(self.sizes):
                others = self.sizes[dim] - 1
                if "all_reduce" in name:
                    self.nbytes[dim] += 2 * args[0].nbytes * others // self.sizes[dim]
                elif groups and ("all_gather" in name or "reduce_scatter" in name):
                    self.nbytes[dim] += min(args[0].nbytes, result.nbytes) * others
                else:
                    raise AssertionError(f"{name} is not counted")
        return result


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
