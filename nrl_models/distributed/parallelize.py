"""Sharding a model in place: linears, vocabulary and experts over `tp` and `ep`, everything over `fsdp`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers import PreTrainedModel

from nrl_models.common.modules import own_modules
from nrl_models.common.projections import groups_of
from nrl_models.common.upstream import is_initialised, mark_initialised
from nrl_models.common.upstream_torch import StridedShard
from nrl_models.distributed.mesh import agreed, check_mesh, describe, has_stages, rank_in, size_of
from nrl_models.distributed.parallel_plan import (
    ParallelPlan,
    Plan,
    expert_styles,
    experts_over,
    is_vocabulary,
    plan_for,
    tensor_styles,
    vocabulary_is_divided,
)
from nrl_models.distributed.pipeline.crossing import copy_on_meta
from nrl_models.distributed.pipeline.cut import Cut, cut_into
from nrl_models.distributed.pipeline.stages import StandIn, keep_stages
from nrl_models.distributed.sharding import Sharding, sharding_of
from nrl_models.distributed.tensor.divided_group import DividedGroup
from nrl_models.distributed.tensor.local_tensors import OnLocalTensors, become
from nrl_models.distributed.tensor.packed_shards import describe_packed_shards, packing_of
from nrl_models.distributed.tensor.styles import REPLICATE, ExpertsOfThisRank, LatentKeys, Style, VocabularyParallel
from nrl_models.errors import Problem, ProblemKind, ShardingError


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, plan: Plan | ParallelPlan = "auto") -> PreTrainedModel:
    """Shard a model that every rank has, in place.

    Every rank keeps its share of each parameter, as DTensors. `model.state_dict_adapter`, `save_pretrained`,
    `load_state_dict` and the functions of `nrl_models.distributed` then work on shares, and optimisers and gradient
    clipping are torch's own; but over `pp` clip by `nrl_models.distributed.clip_grad_norm_` alone. Make the optimiser
    afterwards.

    Args:
        model: on the mesh's kind of device, or on meta; the same on every rank.
        mesh: with dimensions named `pp`, `fsdp`, `ep`, `tp` (any of them, in this order). Ranks that differ in `fsdp`
            take different batches, whose gradients are averaged; those that differ in the others the same batch.
        plan: `"auto"`, rules that change it, or a `ParallelPlan`, which also says in what dtype to compute.

    Returns:
        `model`.

    Raises:
        ShardingError: mesh or plan do not fit the model, or ranks disagree on it; on every rank, and the model is
            then unchanged.
    """
    check_mesh(mesh)
    with agreed(mesh, "shard the model") as facts:
        if getattr(model, "sharding", None) is not None:
            problem = Problem(ProblemKind.MESH, describe(sharding_of(model).mesh), "is its mesh")
            raise ShardingError("the model is sharded already", [problem])
        chosen = plan_for(model, mesh, plan)
        facts |= {"plan": chosen, **_facts(model)}
        cut = cut_for(model, mesh, chosen)
    sharding, whole = divide_stages(model, mesh, chosen, cut)
    sharding.finish(model, whole)
    sharding.agree_on_holders(model)
    divide_data(model, sharding)
    return model


def cut_for(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> Cut | None:
    """Where `pp` cuts a model; None if the mesh lacks it. Nothing is communicated.

    Raises:
        ShardingError: it cannot be cut, with the reason.
    """
    if not has_stages(mesh):
        return None
    ranks = size_of(mesh, "pp")
    dtype = plan.param_dtype if "fsdp" in (mesh.mesh_dim_names or ()) else None
    return cut_into(model, ranks * len(plan.stages_of(0, ranks)), dtype)


def divide_stages(
    model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan, cut: Cut | None
) -> tuple[Sharding, PreTrainedModel]:
    """Apply `pp`, then `tp` and `ep`. Nothing is communicated.

    Args:
        model: changed in place: without the stages that other ranks hold.
        mesh, plan: that fit it.
        cut: from `cut_for`.

    Returns:
        How it is sharded, and the model with all stages, on meta: `model` itself where there are no stages.
    """
    if cut is None:
        divide_model(model, mesh, plan)
        return Sharding(mesh, plan), model
    whole = copy_on_meta(model)
    stages = keep_stages(model, cut, plan.stages_of(rank_in(mesh, "pp"), size_of(mesh, "pp")))
    divide_model(model, mesh, plan, whole)
    divide_model(whole, mesh, plan)
    return Sharding(mesh, plan, stages), whole


def _facts(model: PreTrainedModel) -> dict[str, object]:
    """What ranks must agree on: every parameter's name, shape and dtype, and a sum of its values."""
    facts: dict[str, object] = {"class": type(model).__name__, "config": model.config.to_json_string()}
    own = dict(model.state_dict(keep_vars=True))
    facts["parameters"] = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in own.items()
    ]
    facts["values"] = [
        None
        if tensor.device.type == "meta"
        else (tensor.detach().double().sum().item(), tensor.detach().float().abs().max().item())
        for tensor in own.values()
        if tensor.numel()
    ]
    return facts


def divide_model(
    model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan, whole: PreTrainedModel | None = None
) -> None:
    """Apply `tp` and `ep`: parameters become DTensors, modules exchange activations. Nothing is communicated.

    Args:
        model: changed in place.
        mesh, plan: that fit it.
        whole: the model with all stages of a pipeline, undivided, where `model` lacks some: what is divided depends on
            all of it.
    """
    names = [name for name in ("ep", "tp") if name in mesh.mesh_dim_names]  # type: ignore[operator]
    if names:
        _ModelDivision(model, mesh, mesh[tuple(names)], plan, model if whole is None else whole).apply()


class _ModelDivision:
    """One run of `divide_model`.

    Args:
        model: changed in place.
        mesh: all dimensions.
        inner: `ep` and `tp`, over which parameters become DTensors.
        plan: a plan that fits.
        whole: the model with all stages; undivided so far.
    """

    def __init__(
        self, model: PreTrainedModel, mesh: DeviceMesh, inner: DeviceMesh, plan: ParallelPlan, whole: PreTrainedModel
    ) -> None:
        self.model, self.mesh, self.inner = model, mesh, inner
        self.tensor = tensor_styles(whole, plan) if size_of(mesh, "tp") > 1 else {}
        if self.tensor and not vocabulary_is_divided(whole, mesh):
            for name in [name for name, module in own_modules(whole) if is_vocabulary(whole, module)]:
                self.tensor.pop(name, None)
        self.experts_over = experts_over(whole, mesh, plan)
        self.expert = expert_styles(whole, plan) if self.experts_over else {}
        self.units = plan.units or ()
        self.summed_over: dict[tuple[int, str], str] = {}
        self.done: dict[int, nn.Parameter] = {}  # by the identity of what they replace: tied parameters stay one

    def apply(self) -> None:
        modules: dict[str, Any] = {
            name: module for name, module in own_modules(self.model) if not isinstance(module, StandIn)
        }
        for name, module in modules.items():
            self._divide_module(name, module)
        for module in modules.values():
            if self._needs_local_tensors(module):
                become(module, OnLocalTensors)
                module.summed_over = self.summed_over
                module.is_unit = type(module).__name__ in self.units
        for _, _, group in groups_of(self.model):
            DividedGroup.take_over(group, self.mesh["tp"] if self.tensor else None, self.inner)

    def _divide_module(self, name: str, module: nn.Module) -> None:
        style, expert = self.tensor.get(name, REPLICATE), self.expert.get(name, REPLICATE)
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            own = f"{name}.{attribute}" if name else attribute
            by_tensor, by_expert = self.tensor.get(own, style), self.expert.get(own, expert)
            if by_tensor.sums_gradient or style.sums_gradient:
                self.summed_over[id(module), attribute] = "tp"
            elif expert.sums_gradient and self.experts_over:
                self.summed_over[id(module), attribute] = self.experts_over
            self._divide_parameter(module, attribute, by_tensor, by_expert)
        self._exchange(module, style, expert)

    def _divide_parameter(self, module: nn.Module, attribute: str, tensor: Style, expert: Style) -> None:
        parameter = module._parameters[attribute]
        assert parameter is not None
        if id(parameter) in self.done:
            module._parameters[attribute] = self.done[id(parameter)]
            return
        placements: list[Placement] = []
        local = parameter.detach()
        for dimension in self.inner.mesh_dim_names or ():
            style = REPLICATE if dimension == "ep" else tensor
            if dimension == self.experts_over and expert.dim(parameter.ndim) is not None:
                style = expert
            ranks, rank = size_of(self.mesh, dimension), rank_in(self.mesh, dimension)
            dim = style.dim(parameter.ndim) if ranks > 1 else None
            if dim is None:
                placements.append(Replicate())
                continue
            if style.blocks > 1:
                describe_packed_shards()
            placements.append(Shard(dim) if style.blocks == 1 else StridedShard(dim, split_factor=style.blocks))
            # The dimension holds several blocks one after the other; every rank has a share of each.
            local = torch.cat([block.chunk(ranks, dim)[rank] for block in local.chunk(style.blocks, dim)], dim)
        divided = nn.Parameter(
            DTensor.from_local(
                local.clone() if local.untyped_storage().nbytes() > local.nbytes else local,
                self.inner,
                placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
            requires_grad=parameter.requires_grad,
        )
        if is_initialised(parameter):
            mark_initialised(divided)
        self.done[id(parameter)] = module._parameters[attribute] = divided
        self.done[id(divided)] = divided

    def _exchange(self, module: Any, tensor: Style, expert: Style) -> None:
        mixins: list[type[nn.Module]] = []
        if expert.compute is not None:
            mixins.append(expert.compute)
            assert self.experts_over is not None
            module.ep_mesh = self.mesh[self.experts_over]
        if tensor.compute is not None:
            mixins.append(tensor.compute)
            module.tp_mesh = self.mesh["tp"]
        if ExpertsOfThisRank in mixins:
            module.num_experts //= module.ep_mesh.size()
            module.first_expert = module.ep_mesh.get_local_rank() * module.num_experts
        if VocabularyParallel in mixins:
            tokens = module.weight.shape[0] // size_of(self.mesh, "tp")
            module.first_token = rank_in(self.mesh, "tp") * tokens
            if module.padding_idx is not None:  # a token of this rank's share, or none
                inside = module.first_token <= module.padding_idx < module.first_token + tokens
                module.padding_idx = module.padding_idx - module.first_token if inside else None
        if LatentKeys in mixins:
            module.rotary_features = self.model.config.get_text_config().qk_rope_head_dim
        if mixins:
            become(module, *mixins)

    def _needs_local_tensors(self, module: nn.Module) -> bool:
        """Whether a module may be called by itself: the model, a unit, and outside units any with own parameters."""
        if module is self.model or type(module).__name__ in self.units:
            return True
        has_parameters = any(parameter is not None for parameter in module._parameters.values())
        return has_parameters and id(module) not in self._inside_units

    @cached_property
    def _inside_units(self) -> set[int]:
        units = [module for module in self.model.modules() if type(module).__name__ in self.units]
        return {id(inside) for unit in units for inside in unit.modules()}


def divide_data(model: PreTrainedModel, sharding: Sharding) -> None:
    """Apply `fsdp`, if the mesh has it. Nothing is communicated."""
    mesh, plan = sharding.mesh, sharding.plan
    if "fsdp" not in (mesh.mesh_dim_names or ()):
        return
    ranks = size_of(mesh, "fsdp")
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if plan.offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh["fsdp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype),
        "offload_policy": offload,
        "shard_placement_fn": lambda parameter: _placement(parameter, ranks),
    }
    units = [
        module for module in model.modules() if type(module).__name__ in (plan.units or ()) and module is not model
    ]
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(id(module))
    # Found before any is divided, which puts other parameters in place.
    whole = [unit for unit in units if _keeps_its_weights(unit, owners)]
    if sharding.stages is not None:  # a stage ends inside what holds the layers, which would not free its weights then
        whole = [unit for unit in whole if sharding.stages.stack not in unit.modules()]
    for unit in reversed(whole):  # those within others first
        fully_shard(unit, reshard_after_forward=plan.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=plan.reshard_after_forward, **options)


def _keeps_its_weights(unit: nn.Module, owners: Mapping[int, set[int]]) -> bool:
    """Whether no weight of a unit is tied to one elsewhere: tied weights are gathered by what contains both."""
    inside = {id(module) for module in unit.modules()}
    ids = {id(parameter) for parameter in unit.parameters()}
    return bool(ids) and all(owners[parameter] <= inside for parameter in ids)


def _placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """The dimension of a parameter that `fsdp` divides; None leaves it to torch: the first, unevenly if need be.

    But a stack of experts is divided along their features where ranks do not divide the number of experts: of fewer
    experts than ranks some ranks would have nothing, and the others more than their share. And a dimension of packed
    blocks that `tp` divides is not divided again: no placement describes the result.
    """
    taken: set[int] = set()
    local: torch.Tensor = parameter
    is_packed = False
    if isinstance(parameter, DTensor):
        taken = {placement.dim for placement in parameter.placements if isinstance(placement, (Shard, StridedShard))}
        packing = packing_of(parameter)
        is_packed = packing is not None and packing.dim == 0
        local = parameter.to_local()
    if not is_packed and (parameter.ndim < 3 or len(local) % ranks == 0):
        return None
    even = [dim for dim in reversed(range(1, parameter.ndim)) if dim not in taken and local.shape[dim] % ranks == 0]
    if is_packed and not even:
        detail = f"has shape {tuple(parameter.shape)}, and tp divides the blocks packed in its first dimension"
        problem = Problem(
            ProblemKind.DIVIDE, "a packed parameter", f"{detail}: fsdp={ranks} divides no other dimension"
        )
        raise ShardingError("fsdp cannot divide a packed parameter", [problem], ["give it another style in the plan"])
    return Shard(even[0]) if even else None
