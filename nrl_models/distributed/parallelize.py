"""Shard a model in place: linears, vocabulary and experts over `tp` and `ep`, all parameters over `fsdp`."""

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
from nrl_models.common.projections import CombinedProjections, groups_of
from nrl_models.common.upstream import is_initialized, mark_initialized
from nrl_models.common.upstream_torch import StridedShard
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.kept_dtypes import KeptApart, kept_parameters
from nrl_models.distributed.mesh import SEED_ADVICE, agreed, check_mesh, has_stages, rank_in, size_of
from nrl_models.distributed.parallel_plan import (
    ParallelPlan,
    Plan,
    expert_styles,
    experts_over,
    is_vocabulary,
    tensor_styles,
    vocabulary_is_divided,
)
from nrl_models.distributed.pipeline.crossing import copy_on_meta
from nrl_models.distributed.pipeline.cut import Cut, cut_into
from nrl_models.distributed.pipeline.stages import StandIn, keep_stages
from nrl_models.distributed.replaced_parameters import mark_replaced
from nrl_models.distributed.sharding import Sharding, require_unsharded
from nrl_models.distributed.tensor.divided_group import DividedGroup
from nrl_models.distributed.tensor.local_tensors import OnLocalTensors, become, sum_gradients_over
from nrl_models.distributed.tensor.packed_shards import describe_packed_shards, packing_of
from nrl_models.distributed.tensor.styles import REPLICATE, ExpertsOfThisRank, LatentKeys, Style, VocabularyParallel
from nrl_models.errors import Problem, ProblemKind, ShardingError


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, plan: Plan | ParallelPlan = "auto") -> PreTrainedModel:
    """Shard a model in place and return it. Every rank has to pass the same model.

    Afterwards, the parameters are DTensors, of which each rank holds its shard. nrl_models' functions and torch's
    optimizers support them; with `pp`, clip with `nrl_models.distributed.clip_grad_norm_`. Create the optimizer after
    this call: the step of an older one raises `ShardingError`.

    Args:
        model: The model, on the mesh's device type or on meta.
        mesh: Mesh with dimensions from `pp`, `fsdp`, `ep`, `tp`, in this order. Ranks that differ in `fsdp` process
            different batches, and their gradients are averaged. Ranks that differ in another dimension process the same
            batch.
        plan: `"auto"`, rules that modify it, or a `ParallelPlan`, which also sets the compute dtype.

    Raises:
        ShardingError: On every rank, if mesh or plan do not fit the model, or differ. The model is then unchanged.
        UnknownArgumentError, StateDictError: If `mesh` is not a mesh, or `model` is not a model of transformers.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from nrl_models import AutoModelForCausalLM, parallelize
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))  # started with torchrun
        >>> model = parallelize(AutoModelForCausalLM.from_pretrained("demo/checkpoint"), mesh)
        >>> type(model.lm_head.weight).__name__
        'DTensor'
    """
    check_mesh(mesh)
    with agreed(mesh, "shard the model", {"values": SEED_ADVICE}) as facts:
        require_unsharded(model, mesh, "parallelize(model, mesh, plan)")
        chosen = plan_for(model, mesh, plan)
        facts |= {"plan": chosen, **_facts(model)}
        cut = cut_for(model, mesh, chosen)
    before = list(model.parameters())
    sharding, full_model = divide_stages(model, mesh, chosen, cut)
    sharding.finish(model, full_model)
    sharding.agree_on_holders(model)
    divide_data(model, sharding)
    mark_replaced(before, model)
    return model


def cut_for(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> Cut | None:
    """Return the split of a model into the stages of `pp`; None if the mesh lacks it. Does not communicate.

    Raises:
        ShardingError: If it cannot be split. The message has the reason.
    """
    if not has_stages(mesh):
        return None
    ranks = size_of(mesh, "pp")
    dtype = plan.param_dtype if "fsdp" in (mesh.mesh_dim_names or ()) else None
    return cut_into(model, ranks * len(plan.stages_of(0, ranks)), dtype)


def divide_stages(
    model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan, cut: Cut | None
) -> tuple[Sharding, PreTrainedModel]:
    """Apply `pp`, then `tp` and `ep`. Does not communicate.

    Args:
        model: The model, modified in place. Stages of other ranks are removed.
        mesh, plan: Mesh and plan that fit the model.
        cut: Result of `cut_for`.

    Returns:
        The sharding state, and the model with all stages on meta (`model` itself if there are no stages).
    """
    if cut is None:
        divide_model(model, mesh, plan)
        return Sharding(mesh, plan), model
    full_model = copy_on_meta(model)
    stages = keep_stages(model, cut, plan.stages_of(rank_in(mesh, "pp"), size_of(mesh, "pp")))
    divide_model(model, mesh, plan, full_model)
    divide_model(full_model, mesh, plan)
    return Sharding(mesh, plan, stages), full_model


def _facts(model: PreTrainedModel) -> dict[str, object]:
    """Return the values that ranks must agree on: each parameter's name, shape, dtype and sum."""
    facts: dict[str, object] = {"class": type(model).__name__, "config": model.config.to_json_string()}
    state_dict = dict(model.state_dict(keep_vars=True))
    facts["parameters"] = {
        name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in state_dict.items()
    }
    facts["values"] = {
        name: (tensor.detach().double().sum().item(), tensor.detach().float().abs().max().item())
        for name, tensor in state_dict.items()
        if tensor.numel() and tensor.device.type != "meta"
    }
    return facts


def divide_model(
    model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan, full_model: PreTrainedModel | None = None
) -> None:
    """Apply `tp` and `ep`: parameters become DTensors, and modules exchange activations. Does not communicate.

    Args:
        model: The model, modified in place.
        mesh, plan: Mesh and plan that fit the model.
        full_model: Unsharded model with all pipeline stages, if `model` lacks some. The sharding depends on all stages.
    """
    names = [name for name in ("ep", "tp") if name in mesh.mesh_dim_names]  # type: ignore[operator]
    if names:
        _ModelDivision(model, mesh, mesh[tuple(names)], plan, model if full_model is None else full_model).apply()


class _ModelDivision:
    """State of one call of `divide_model`.

    Args:
        model: The model, modified in place.
        mesh: The complete mesh.
        inner: The dimensions `ep` and `tp`, over which parameters become DTensors.
        plan: Plan that fits the model.
        full_model: The unsharded model with all stages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        inner: DeviceMesh,
        plan: ParallelPlan,
        full_model: PreTrainedModel,
    ) -> None:
        self.model, self.mesh, self.inner = model, mesh, inner
        self.tensor = tensor_styles(full_model, plan) if size_of(mesh, "tp") > 1 else {}
        if self.tensor and not vocabulary_is_divided(full_model, mesh):
            for name in [name for name, module in own_modules(full_model) if is_vocabulary(full_model, module)]:
                self.tensor.pop(name, None)
        self.experts_over = experts_over(full_model, mesh, plan)
        self.expert = expert_styles(full_model, plan) if self.experts_over else {}
        self.units = plan.units or ()
        self.done: dict[int, nn.Parameter] = {}  # by id of the replaced parameter, so that tied ones stay tied

    def apply(self) -> None:
        named_modules = own_modules(self.model)
        modules: dict[str, Any] = {name: module for name, module in named_modules if not isinstance(module, StandIn)}
        for name, module in modules.items():
            self._divide_module(name, module)
        for module in modules.values():
            if self._needs_local_tensors(module):
                become(module, OnLocalTensors)
                module.is_unit = type(module).__name__ in self.units
        if self.tensor:  # a group exchanges its input once, even in models that are not fused otherwise
            for name, module in modules.items():
                if isinstance(module, CombinedProjections):
                    module.combine_projections(name)
        for _, _, group in groups_of(self.model):
            DividedGroup.take_over(group, self.mesh["tp"] if self.tensor else None, self.inner)

    def _divide_module(self, name: str, module: nn.Module) -> None:
        style, expert = self.tensor.get(name, REPLICATE), self.expert.get(name, REPLICATE)
        summed_over: dict[str, str] = {}
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            parameter_name = f"{name}.{attribute}" if name else attribute
            by_tensor, by_expert = self.tensor.get(parameter_name, style), self.expert.get(parameter_name, expert)
            if by_tensor.sums_gradient or style.sums_gradient:
                summed_over[attribute] = "tp"
            elif expert.sums_gradient and self.experts_over:
                summed_over[attribute] = self.experts_over
            self._divide_parameter(module, attribute, by_tensor, by_expert)
        if summed_over:
            sum_gradients_over(module, summed_over)
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
        if is_initialized(parameter):
            mark_initialized(divided)
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
        """Return True for modules that may be called directly: the model, units, and others with own parameters."""
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
    separate_parameters = kept_parameters(model, plan)
    apart = KeptApart(mesh, plan, separate_parameters) if separate_parameters else None
    if apart is not None:
        options["shard_placement_fn"] = apart.placed(options["shard_placement_fn"])
    units = [unit for unit in model.modules() if type(unit).__name__ in (plan.units or ()) and unit is not model]
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(id(module))
    units_to_shard = [unit for unit in units if _keeps_its_weights(unit, owners)]  # before sharding replaces parameters
    if sharding.stages is not None:  # a stage ends inside the parent of the layers, which would not free its weights
        units_to_shard = [unit for unit in units_to_shard if sharding.stages.stack not in unit.modules()]
    for unit in [*reversed(units_to_shard), model]:  # nested units first
        policy = options["mp_policy"] if apart is None else apart.policy_of(unit, options["mp_policy"], unit is model)
        sharded = fully_shard(unit, reshard_after_forward=plan.reshard_after_forward, **options | {"mp_policy": policy})
        if apart is not None:
            apart.keep(sharded)


def _keeps_its_weights(unit: nn.Module, owners: Mapping[int, set[int]]) -> bool:
    """Return True if no weight of a unit is tied to a module outside. Tied weights are gathered by a common parent."""
    inside = {id(module) for module in unit.modules()}
    ids = {id(parameter) for parameter in unit.parameters()}
    return bool(ids) and all(owners[parameter] <= inside for parameter in ids)


def _placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Return the dimension of a parameter that `fsdp` shards. None uses torch's default: the first, possibly unevenly.

    A stack of experts is sharded along its features if the number of experts is not divisible by the ranks. Otherwise
    some ranks might get no expert. A dimension of packed blocks that `tp` shards is not sharded again, because no
    placement describes the result.
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
            ProblemKind.INDIVISIBLE, "a packed parameter", f"{detail}: fsdp={ranks} divides no other dimension"
        )
        raise ShardingError("fsdp cannot divide a packed parameter", [problem], ["give it another style in the plan"])
    return Shard(even[0]) if even else None
