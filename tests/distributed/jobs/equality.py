"""What a sharded model computes, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from jobs.setting import assert_same, batches, case_of, llama_case, mesh_of, train
from nrl_models.common import ProjectionPart
from nrl_models.distributed import ParallelPlan, parallelize, plan_for
from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.testing.case import FamilyCase


def expected(case: FamilyCase, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process over all batches, by Hugging Face name."""
    model = copy.deepcopy(case.model()).train()
    losses = []
    for seed, batch in enumerate(batches(case, count)):
        torch.manual_seed(seed)  # some routers draw lots in training
        losses.append(model(**batch, use_cache=False).loss / count)
    torch.stack(losses).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return sum(loss.item() for loss in losses), model.state_dict_adapter.to_hf(gradients)


def step(model: PreTrainedModel, case: FamilyCase) -> float:
    """One forward and backward on this rank's batch; the loss over all."""
    mesh = model.sharding.mesh
    number = rank_in(mesh, "fsdp")
    batch = batches(case, size_of(mesh, "fsdp"))[number]
    torch.manual_seed(number)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def whole_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The gradients of a sharded model, whole, by Hugging Face name."""
    own = {name: one.grad.full_tensor() for name, one in model.named_parameters() if one.grad is not None}
    return model.state_dict_adapter.to_hf(own)


def equals_one_process(
    architecture: str, checkpointing: bool = False, config: dict[str, Any] | None = None, **sizes: int
) -> dict[str, float]:
    """How far loss and gradients of a sharded model are from one process's."""
    return _differences(case_of(architecture, config), checkpointing, sizes)


def llama_equals_one_process(config: dict[str, Any], combine: bool = True, **sizes: int) -> dict[str, float]:
    """The same for a Llama with other values in its configuration."""
    return _differences(llama_case(config, combine), False, sizes)


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
        # Held so that what fsdp divides is the first dimension, which FSDP gathers without a further copy.
        held = {"fsdp": Shard(0), "tp": Shard(1 if "fsdp" in sizes else 0)}
        assert part.combined.weight.placements == tuple(held[dim] for dim in sizes)
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
    rows, columns = whole.get_parameter(combined).shape
    trained = {"lora_A": torch.randn(2, columns), "lora_B": torch.randn(rows, 2)}
    lora = {f"{combined.removesuffix('.weight')}.{side}.weight": tensor for side, tensor in trained.items()}
    assert_same(model.state_dict_adapter.lora_to_hf(lora), whole.state_dict_adapter.lora_to_hf(lora))


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
