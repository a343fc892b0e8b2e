"""Compare a sharded model with one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jobs.setting import LENGTH, batches, case_of, llama_case, mesh_of, train
from nrl_models.common.backend import Combine
from nrl_models.common.projections import report
from nrl_models.distributed import ParallelPlan, parallelize, plan_for
from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.distributed.tensor.local_tensors import _local_tensors
from nrl_models.parity.noise import rounded_otherwise
from nrl_models.testing.case import FamilyCase


def expected(case: FamilyCase, count: int, *, rounded: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute loss and gradients of one process over all batches, by hub name.

    Args:
        case: The case.
        count: Number of batches.
        rounded: Whether linears round in another way, see `rounded_otherwise`.
    """
    model = copy.deepcopy(case.model()).train()
    losses = []
    with rounded_otherwise(model) if rounded else nullcontext():
        for seed, batch in enumerate(batches(case, count)):
            torch.manual_seed(seed)  # some routers draw random numbers in training
            losses.append(model(**batch, use_cache=False).loss / count)
        torch.stack(losses).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return sum(loss.item() for loss in losses), model.state_dict_adapter.to_hf(gradients)


def step(model: PreTrainedModel, case: FamilyCase) -> float:
    """Run a forward and backward on this rank's batch. Returns the loss over all ranks."""
    mesh = model.sharding.mesh
    number = rank_in(mesh, "fsdp")
    batch = batches(case, size_of(mesh, "fsdp"))[number]
    torch.manual_seed(number)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def full_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the complete gradients of a sharded model, by hub name."""
    gradients = {
        name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return model.state_dict_adapter.to_hf(gradients)


def equals_one_process(
    architecture: str,
    checkpointing: bool = False,
    config: dict[str, Any] | None = None,
    copied: bool = False,
    **sizes: int,
) -> dict[str, float]:
    """Return the differences of loss and gradients between a sharded model, or a deep copy of it, and one process."""
    return _differences(case_of(architecture, config), checkpointing, sizes, copied)


def llama_equals_one_process(config: dict[str, Any], **sizes: int) -> dict[str, float]:
    """Run `equals_one_process` on a Llama with other configuration values."""
    return _differences(llama_case(config), False, sizes)


def _differences(
    case: FamilyCase, checkpointing: bool, sizes: dict[str, int], copied: bool = False
) -> dict[str, float]:
    mesh = mesh_of(**sizes)
    loss, gradients = expected(case, size_of(mesh, "fsdp"))
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if copied:
        model = copy.deepcopy(model)
    actual = step(model, case)
    actual_gradients = full_gradients(model)
    assert sorted(actual_gradients) == sorted(gradients)
    worst = max(float((actual_gradients[name] - gradients[name]).abs().max()) for name in gradients)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    # Rounding errors grow with the largest gradient.
    return {"loss": abs(actual - loss), "gradients": worst / max(1.0, scale), "scale": scale}


def accepts(architectures: list[str], **sizes: int) -> None:
    """Check that a plan exists for each architecture."""
    mesh = mesh_of(**sizes)
    for architecture in architectures:
        plan_for(case_of(architecture).model(), mesh)


def projections_are_dtensors(config: dict[str, Any], **sizes: int) -> list[tuple[str, bool, str]]:
    """Check that each weight and bias is a separate DTensor with its own placement. Returns how groups run."""
    case = llama_case(config)
    unsharded, mesh = case.model(), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(unsharded), mesh)
    assert list(model.state_dict()) == list(case.reference().state_dict())
    for name, linear in unsharded.named_modules():
        if type(linear) is not nn.Linear or name == "lm_head":
            continue
        by_rows = not name.endswith(("o_proj", "down_proj"))
        weight, bias = model.get_submodule(name).weight, model.get_submodule(name).bias
        shard_dims = {dim: placement.dim for dim, placement in zip(sizes, weight.placements, strict=True)}
        assert shard_dims == {dim: 0 if dim == "fsdp" or by_rows else 1 for dim in sizes}, name
        assert torch.equal(weight.full_tensor(), linear.weight)
        assert torch.equal(bias.full_tensor(), linear.bias)
    return [(group.name, group.joined, "" if group.joined else str(group.reason)) for group in report(model)]


def fused_matmul_uses_updated_weights(**sizes: int) -> None:
    """Check that an optimizer step changes the weights of the fused matmul."""
    case, mesh = case_of("Qwen2ForCausalLM"), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.mul_(2)
    shares = [projection.weight.to_local() for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(attention.qkv_proj.weight, torch.cat(shares))
    assert attention.qkv_proj.weight.data_ptr() == shares[0].data_ptr()
    copied = copy.deepcopy(model)
    assert all(group.joined for group in report(copied))
    (batch,) = batches(case, 1)
    with torch.no_grad():
        before = model(**batch, use_cache=False).logits
        copied.model.layers[0].self_attn.k_proj.weight.mul_(2)
        assert torch.equal(model(**batch, use_cache=False).logits, before)
        assert not torch.equal(copied(**batch, use_cache=False).logits, before)
        attention.k_proj.weight.mul_(2)
        torch.testing.assert_close(copied(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits)


def collectives(architecture: str, combine: Combine = True, **sizes: int) -> list[dict[str, int]]:
    """Count matmuls and collectives of one attention's and one MLP's group, in the forward and the backward."""
    case, mesh = case_of(architecture), mesh_of(**sizes)
    torch.manual_seed(0)
    model = parallelize(case.model_class.from_config(case.config, combine=combine).train(), mesh)
    layer = model.model.layers[0]
    if isinstance(layer, FSDPModule):
        layer.unshard()
    counts = []
    for owner, name in ((layer.self_attn, "qkv_proj"), (layer.mlp, "gate_up_proj")):
        group = owner.__dict__[name]
        input = torch.randn(2, LENGTH, model.config.hidden_size, requires_grad=True)
        with _local_tensors(layer), Counts() as forward:
            run = group.begin()
            outputs = [part(input) for part in group.linears.values()]
            group.end(run, complete=True)
        with Counts() as backward:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        counts.append({"forward": forward.seen, "backward": backward.seen})
    return counts


class Counts(TorchDispatchMode):
    """Count matmuls and collectives. torch's `CommDebugMode` hooks every module, which would disable fusing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"matmuls": 0, "all_reduce": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen["matmuls"] += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        namespace, _, name = func._schema.name.partition("::")
        if "c10d" in namespace and not ("wait" in name or "wrap" in name):
            self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def step_collectives(architecture: str, **sizes: int) -> list[dict[str, int]]:
    """Count the collectives in the forward and the backward of a training step."""
    case, mesh = case_of(architecture), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    (batch,) = batches(case, 1)
    with Counts() as forward:
        loss = model(**batch, use_cache=False).loss
    with Counts() as backward:
        loss.backward()
    return [{name: count for name, count in record.seen.items() if name != "matmuls"} for record in (forward, backward)]


def trains_as_one_process(config: dict[str, Any], **sizes: int) -> float:
    """Return the largest difference of any weight after a few steps with gradient clipping."""
    case = llama_case(config)
    unsharded = copy.deepcopy(case.model()).train()
    model = parallelize(copy.deepcopy(unsharded), mesh_of(**sizes))
    losses = [
        train(trained, torch.optim.SGD(trained.parameters(), lr=0.3), case, range(4)) for trained in (unsharded, model)
    ]
    assert losses[0][-1] != losses[0][0]
    expected = dict(unsharded.state_dict_adapter.iter_export(unsharded))
    moved = expected["model.layers.0.self_attn.k_proj.bias"] - case.model().model.layers[0].self_attn.k_proj.bias
    assert float(moved.detach().abs().max()) > 1e-6  # biases of keys have tiny gradients
    return max(
        float((tensor - expected[name]).abs().max()) for name, tensor in model.state_dict_adapter.iter_export(model)
    )


def mixed_precision() -> dict[str, str]:
    """Return the dtypes in which a model with fp32 weights stores, computes and reduces."""
    case, mesh = case_of("LlamaForCausalLM"), mesh_of(fsdp=2)
    model = copy.deepcopy(case.model()).train()
    parallelize(model, mesh, ParallelPlan(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: seen.append(str(attention.q_proj.weight.dtype)))
    step(model, case)
    parameter = attention.q_proj.weight
    return {"kept": str(parameter.dtype), "gradients": str(parameter.grad.dtype), "computed": seen[0]}


def computes_in_kept_dtypes(architecture: str, folder: str) -> dict[str, Any]:
    """Compare FSDP in bf16 with one process that loads the checkpoint in bf16: dtypes of parameters, and the loss.

    Returns:
        For bf16 weights and for fp32 weights with `param_dtype`: parameters that compute in another dtype than in one
        process, and the difference of the losses relative to the loss. Also the number of tensors that stay in fp32. If
        one process fails: its error.
    """
    case, mesh, bf16 = case_of(architecture), mesh_of(fsdp=2), torch.bfloat16
    if dist.get_rank() == 0:
        case.reference().save_pretrained(folder)
    dist.barrier()
    unsharded = case.model_class.from_pretrained(folder, dtype=bf16).train()
    dtypes = {name: parameter.dtype for name, parameter in unsharded.named_parameters(remove_duplicate=False)}
    expected_loss = 0.0
    for seed, batch in enumerate(batches(case, 2)):
        torch.manual_seed(seed)
        try:
            expected_loss += unsharded(**batch, use_cache=False).loss.item() / 2
        except RuntimeError as error:
            return {"one process": str(error)}
    kept = [tensor for tensor in unsharded.state_dict().values() if tensor.dtype == torch.float32]
    results: dict[str, Any] = {"kept": len(kept)}
    for label, dtype, param_dtype in (("bf16", bf16, None), ("masters", torch.float32, bf16)):
        plan = ParallelPlan(param_dtype=param_dtype, reduce_dtype=torch.float32)
        model = case.model_class.from_pretrained(folder, dtype=dtype, mesh=mesh, plan=plan).train()
        computed: dict[str, torch.dtype] = {}

        def note(module: nn.Module, args: Any, path: str, computed: dict[str, torch.dtype] = computed) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                computed[f"{path}.{name}" if path else name] = parameter.dtype

        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(note, path=path))
        loss = step(model, case)
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        assert all(parameter.grad.dtype == parameter.dtype for parameter in trained)
        results[label] = {name: str(seen) for name, seen in computed.items() if seen != dtypes[name]}
        results[f"{label} loss"] = abs(loss - expected_loss) / expected_loss
    return results


def generates_as_one_process(architecture: str, **sizes: int) -> None:
    """Check that greedy generation gives the same tokens."""
    case = case_of(architecture)
    inputs = case.inputs(length=8)
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    expected = case.model().generate(**inputs, **options)
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    assert torch.equal(model.generate(**inputs, **options), expected)


def plain_fully_shard(architecture: str) -> None:
    """Shard with torch only: loss, gradients and names equal transformers', also the names of optimizer states."""
    case = case_of(architecture)
    results = {}
    for kind, source in (("ours", case.model()), ("theirs", case.reference())):
        model = copy.deepcopy(source).train()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(0)
        loss = model(**batches(case, 2)[dist.get_rank()], use_cache=False).loss
        loss.backward()
        gradients = {
            name: parameter.grad.full_tensor()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        optimizer.step()
        options = StateDictOptions(full_state_dict=True)
        results[kind] = float(loss), gradients, get_state_dict(model, optimizer, options=options)
        if kind == "ours":
            groups = report(model)
            assert groups
            assert not any(group.joined for group in groups)
            assert all("is a DTensor" in str(group.reason) for group in groups)
    (loss, gradients, (weights, states)), (their_loss, their_gradients, (their_weights, their_states)) = (
        results.values()
    )
    assert abs(loss - their_loss) <= 1e-6
    assert sorted(gradients) == sorted(their_gradients)
    assert max(float((gradients[name] - gradient).abs().max()) for name, gradient in their_gradients.items()) <= 1e-6
    assert list(weights) == list(their_weights)
    assert states["state"].keys() == their_states["state"].keys()
    assert states["param_groups"][0]["params"] == their_states["param_groups"][0]["params"]
    for name, kinds in their_states["state"].items():
        for kind, value in kinds.items():
            torch.testing.assert_close(states["state"][name][kind], value, atol=1e-6, rtol=1e-4)


def data_parallel(architecture: str) -> None:
    """Under DDP, loss and gradients equal one process's, under transformers' names. Groups stay fused."""
    case = case_of(architecture)
    loss, gradients = expected(case, 2)
    model = copy.deepcopy(case.model()).train()
    model = nn.parallel.DistributedDataParallel(model)
    local_loss = model(**batches(case, 2)[dist.get_rank()], use_cache=False).loss
    local_loss.backward()
    dist.all_reduce(total := local_loss.detach().clone())
    assert abs(float(total) / 2 - loss) <= 1e-6
    results = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    assert sorted(results) == sorted(gradients)
    assert max(float((results[name] - gradients[name]).abs().max()) for name in gradients) <= 1e-5
    assert all(group.joined for group in report(model))
