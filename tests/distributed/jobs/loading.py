"""Load over a mesh, and the errors that may occur."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

import nrl_models
from jobs.memory import Peak
from jobs.setting import assert_same, case_of, mesh_of
from nrl_models import AutoModelForCausalLM, AutoModelForSequenceClassification
from nrl_models.common.projections import report
from nrl_models.distributed import parallelize
from nrl_models.errors import NRLModelsError
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.loading import sharded
from nrl_models.parity.noise import limit, logits_noise


def loads(folder: str, architecture: str, **sizes: int) -> dict[str, Any]:
    """Load a checkpoint sharded. Its tensors and outputs equal those of one process."""
    case = case_of(architecture)
    mesh = mesh_of(**sizes)
    unsharded = case.model_class.from_pretrained(folder, combine=True)
    model = case.model_class.from_pretrained(folder, mesh=mesh, plan="auto", combine=True)
    assert not model.training
    for layout in ("hub", "transformers"):
        expected = dict(unsharded.state_dict_adapter.iter_export(unsharded, layout=layout))
        assert_same(dict(model.state_dict_adapter.iter_export(model, layout=layout)), expected)
    assert_same(dict(model.named_buffers()), dict(unsharded.named_buffers()))
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == {
        name: parameter.dtype for name, parameter in unsharded.named_parameters()
    }
    assert list(model.state_dict()) == list(unsharded.state_dict())
    groups = report(model)
    assert ["fsdp" not in sizes] * len(groups) == [group.joined for group in groups], groups
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None:
        tied = unsharded.get_output_embeddings().weight is unsharded.get_input_embeddings().weight
        assert (head.weight is embeddings.weight) is tied
    inputs = case.inputs()
    with torch.no_grad():
        difference = (model(**inputs).logits - unsharded(**inputs).logits).abs().max().item()
    nbytes = sum(tensor.nbytes for tensor in unsharded.state_dict_adapter.to_hf(unsharded.state_dict()).values())
    return {"logits": difference, "read": model.sharding.loaded_bytes / nbytes}


def loads_alike(path: str, auto: str, **sizes: int) -> tuple[float, float]:
    """Load with an auto class, sharded and complete, with equal tensors.

    Returns the largest difference of outputs, and twice the noise limit: two ranks add in two other orders, which
    changes outputs of random weights of 4 bits by more than 1e-5.
    """
    auto_class = getattr(nrl_models, auto)
    unsharded, model = auto_class.from_pretrained(path), auto_class.from_pretrained(path, mesh=mesh_of(**sizes))
    assert_same(
        dict(model.state_dict_adapter.iter_export(model)), dict(unsharded.state_dict_adapter.iter_export(unsharded))
    )
    inputs = inputs_for(unsharded, length=12)
    with torch.no_grad():
        difference = (model(**inputs)[0] - unsharded(**inputs)[0]).abs().max().item()
    return difference, 2 * limit(logits_noise(unsharded, inputs), torch.float32)


def loads_state_dict(folder: str, **sizes: int) -> None:
    """Load a state dict over a mesh, without a directory."""
    unsharded = AutoModelForCausalLM.from_pretrained(folder)
    tensors = dict(unsharded.state_dict_adapter.iter_export(unsharded))
    model = AutoModelForCausalLM.from_pretrained(
        None, config=unsharded.config, state_dict=tensors, mesh=mesh_of(**sizes), dtype=unsharded.dtype
    )
    assert_same(dict(model.state_dict_adapter.iter_export(model)), tensors)


def loads_over(folder: str, sizes: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    """Load over a mesh with any dimension names, or none."""
    AutoModelForCausalLM.from_pretrained(folder, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))


def loads_plainly(folder: str, plan: Any = "auto", **sizes: int) -> None:
    """Load over a mesh. If that raises an error, the rank has neither read nor allocated anything."""
    with mock.patch.object(sharded, "_fill", side_effect=sharded._fill) as fill:
        try:
            AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes), plan=plan)
        except NRLModelsError:
            assert not fill.called, "the rank allocated memory before the error"
            raise


def loads_differently(folders: list[str], **sizes: int) -> None:
    """Load another folder on each rank."""
    loads_plainly(folders[dist.get_rank()], **sizes)


def shards_what_differs(**sizes: int) -> None:
    """Shard a model with other weights on each rank."""
    model = copy.deepcopy(case_of("LlamaForCausalLM").model())
    with torch.no_grad():
        model.model.norm.weight.add_(dist.get_rank())
    parallelize(model, mesh_of(**sizes))


def dies_while_loading(folder: str, dying: int, **sizes: int) -> None:
    """One rank exits while it reads."""
    if dist.get_rank() == dying:
        sharded._fill = lambda *_: os._exit(3)  # type: ignore[assignment]
    AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes))


def peak_of_loading(folder: str, **sizes: int) -> dict[str, int]:
    """Return the peak memory of loading, and of then writing every weight, on this rank.

    `copied` counts the bytes of shards that are divided along columns, which no file has contiguously.
    """
    mesh = mesh_of(**sizes)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), device="meta")  # imports
    with Peak() as loading:
        model = AutoModelForCausalLM.from_pretrained(folder, mesh=mesh)
    local = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    columns = [
        parameter.to_local().nbytes
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and any(placement.is_shard(1) for placement in parameter.placements)
    ]
    with Peak() as writing, torch.no_grad():
        for tensor in local:
            tensor.add_(1)
    del model
    return {"loading": loading.peak, "writing": writing.peak, "copied": sum(columns)}


def loads_classifier(folder: str, keywords: dict[str, Any], **sizes: int) -> dict[str, Any]:
    """Load a classifier from a language model. Its new head is the same on all ranks."""
    torch.manual_seed(dist.get_rank())
    model = AutoModelForSequenceClassification.from_pretrained(folder, mesh=mesh_of(**sizes), num_labels=6, **keywords)
    weights = dict(model.state_dict_adapter.iter_export(model))
    unsharded = AutoModelForCausalLM.from_pretrained(folder)
    expected = unsharded.state_dict_adapter.to_hf(unsharded.state_dict())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, weights["score.weight"])
    return {
        "std": float(weights["score.weight"].std()),
        "same": all(torch.equal(value, gathered[0]) for value in gathered),
        "body": all(torch.equal(tensor, expected[name]) for name, tensor in weights.items() if name != "score.weight"),
    }


def initializes_layers(folder: str, **sizes: int) -> dict[str, Any]:
    """Load a checkpoint that lacks a linear of every layer. Layers get different values, all ranks the same."""
    model = AutoModelForCausalLM.from_pretrained(folder, mesh=mesh_of(**sizes), strict=False)
    weights = dict(model.state_dict_adapter.iter_export(model))
    initialized = [weights[f"model.layers.{index}.mlp.down_proj.weight"] for index in range(2)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, initialized)
    return {
        "std": [float(weight.std()) for weight in initialized],
        "equal layers": torch.equal(*initialized),
        "equal ranks": all(torch.equal(*pair) for found in gathered for pair in zip(found, initialized, strict=True)),
    }
