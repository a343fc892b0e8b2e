"""Sharding state of a model: mesh, plan, and the Hugging Face tensors that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.documents.packing import models_to_decoder
from nrl_models.common.modules import class_name, innermost, names_in_state_dict
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.buckets import BufferPool, pool_of
from nrl_models.common.state_dict.layouts import own_tensors
from nrl_models.common.state_dict.own_tensors import model_inside, own_state_dict, parameters_outside, require_values
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.views.view import HFTensor
from nrl_models.distributed.forward_checks import ChecksForward, Slots
from nrl_models.distributed.mesh import agreed, describe, gather_over, rank_in, reporting_dead_ranks, size_of
from nrl_models.distributed.parallel_plan import ParallelPlan
from nrl_models.distributed.pipeline.stages import Stages
from nrl_models.distributed.replaced_parameters import retie
from nrl_models.distributed.shards import DEFAULT_BUCKET, GATHER, blocks_of, gathered
from nrl_models.distributed.tensor.local_tensors import become
from nrl_models.errors import Problem, ProblemKind, ShardingError, UnknownArgumentError, type_shown

Gatherer = Callable[[Mapping[str, HFTensor], int], Iterator[tuple[str, torch.Tensor]]]
"""Function of Hugging Face tensors and a bucket size that yields complete tensors by name."""


class Sharding:
    """Sharding state of a model, stored as `model.sharding`.

    Args:
        mesh: Mesh that the model is sharded over.
        plan: Plan of the sharding.
        stages: Pipeline stages of this rank; None without `pp`.

    Attributes:
        adapter: The model's adapter. Its tables describe unsharded tensors (`DTensor.full_tensor()`) of all stages. Use
            `adapter_of`, which updates it.
        names: Names of the model's own tensors on this rank.
        holders: First rank of `pp` that holds each tensor of the model; empty without `pp`.
        total_parameters: Number of parameters of the unsharded model.
        loaded_bytes: Bytes that this rank read from the checkpoint, if the model was loaded sharded.
        slots: Locations of the model's parameters.
        is_checking: Whether a checked forward is running, see `ChecksForward`.
        save_group: Process group of asynchronous saves, once there was one.
    """

    adapter: StateDictAdapter
    names: Set[str] = frozenset()
    holders: Mapping[str, int] = MappingProxyType({})
    total_parameters: int = 0
    loaded_bytes: int = 0
    slots: Slots
    is_checking: bool = False
    save_group: dist.ProcessGroup | None = None

    def __init__(self, mesh: DeviceMesh, plan: ParallelPlan, stages: Stages | None = None) -> None:
        self.mesh, self.plan, self.stages = mesh, plan, stages

    def __deepcopy__(self, memo: dict[int, object]) -> Sharding:
        return self

    def finish(
        self,
        model: PreTrainedModel,
        full_model: PreTrainedModel,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        """Record the model's tensors. Call it before `fsdp` is applied, which renames classes.

        Args:
            model: The model.
            full_model: The model with the stages of all ranks.
            dtypes: Dtypes of tensors that will be loaded, if they currently have others.
        """
        self.adapter = StateDictAdapter(full_model).with_dtypes(dtypes)
        self.names = frozenset(own_tensors(model))
        self.total_parameters = full_model.num_parameters()
        cast(Any, model).sharding = self
        self.slots = Slots(model, self.mesh)
        for part in (model, *models_to_decoder(model)):
            cast(Any, part).checked_by = self
            become(part, ChecksForward)
        model.register_load_state_dict_pre_hook(_fill_shards)
        model.register_load_state_dict_post_hook(_retie)
        model.register_state_dict_pre_hook(_require_same_parameters)

    def agree_on_holders(self, model: nn.Module) -> None:
        """Determine the ranks of `pp` that hold each tensor. Every rank has to call this.

        Raises:
            ShardingError: On every rank, if no rank holds a tensor.
        """
        if self.stages is None:
            return
        holders: dict[str, int] = {}
        for rank, names in enumerate(gather_over(self.mesh["pp"], list(own_state_dict(model)))):
            for name in names:
                holders.setdefault(name, rank)
        if lost := [name for name in self.adapter.specs if name not in holders]:
            problems = [Problem(ProblemKind.MISSING, name, "is in no stage") for name in lost]
            raise ShardingError("the stages do not make up the model", problems)
        self.holders = holders

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank of `pp` that holds a stage."""
        ranks = size_of(self.mesh, "pp")
        return next(rank for rank in range(ranks) if stage in self.plan.stages_of(rank, ranks))

    def is_first_holder(self, name: str) -> bool:
        """Return True if this rank is the first of `pp` that holds a tensor. The first holder writes it."""
        return not self.holders or self.holders[name] == rank_in(self.mesh, "pp")

    def adapter_of(self, model: nn.Module) -> StateDictAdapter:
        """Return the adapter with the model's current ties and dtypes. Does not communicate.

        With `pp`, tensors of other stages have the dtypes of the last export or save.
        """
        self.adapter = self.adapter.with_dtypes({name: spec.dtype for name, spec in own_tensors(model).items()})
        return self.adapter.retied(model)

    def require_same_tensors(self, model: nn.Module) -> None:
        """Check that the model has the tensors that it had when it was sharded. Does not communicate.

        Raises:
            ShardingError: If trainable parameters were added, or any tensors were added, replaced, removed or resized.
        """
        self.slots.require_same_parameters(model)
        self.slots.require_no_later_parameters(model)
        specs = own_tensors(model)
        gone, added = self.names - specs.keys(), specs.keys() - self.names
        problems = [Problem(ProblemKind.MISSING, name, "is no longer in the model") for name in sorted(gone)]
        problems += [Problem(ProblemKind.UNEXPECTED, name, "was added after sharding") for name in sorted(added)]
        if problems := problems + self.adapter.other_shapes(specs):
            advice = (
                "change the model before sharding it: load it without a mesh, add, remove or resize modules, and then "
                "call nrl_models.distributed.parallelize(model, mesh)"
            )
            raise ShardingError(f"{class_name(model)} has changed since it was sharded", problems, [advice])

    def written(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's own tensors, except those that an earlier rank of `pp` also holds.

        Raises:
            ShardingError: See `require_same_tensors`.
        """
        self.require_same_tensors(model)
        return {name: tensor for name, tensor in own_state_dict(model).items() if self.is_first_holder(name)}

    def hf_views(self, model: nn.Module, exported: Mapping[str, HFTensor]) -> dict[str, torch.Tensor]:
        """Return views of Hugging Face tensors as DTensors, see `StateDictAdapter.hf_views`."""
        self.require_same_tensors(model)
        local_state = own_state_dict(model)
        require_values(model, local_state)
        # No placement describes a region of a parameter.
        return {
            name: local_state[tensor.view.parameter]
            for name, tensor in exported.items()
            if tensor.view is not None and not tensor.view.steps and tensor.view.parameter in local_state
        }

    def iter_export(
        self, model: nn.Module, exported: Mapping[str, HFTensor], max_bytes: int | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield complete tensors, bucket by bucket, see `StateDictAdapter.iter_export`."""
        gather = self.gatherer(model, pool_of(model, _device_of(model)))
        yield from gather(exported, DEFAULT_BUCKET if max_bytes is None else max_bytes)

    def gatherer(self, model: nn.Module, pool: BufferPool | None = None) -> Gatherer:
        """Return a function that gathers tensors of the model, see `shards.gathered`. It can be called several times.

        Also updates the dtypes in `adapter`. Every rank has to call this.

        Args:
            model: The model.
            pool: Allocates the buckets. None uses a pool that is freed with the gatherer.
        """
        buffers = pool or BufferPool(_device_of(model))
        stages = self.mesh["pp"] if self.stages is not None else None
        with agreed(stages, GATHER):
            local_state, adapter = self.written(model), self.adapter_of(model)
            require_values(model, local_state)
        own_dtypes = {name: spec.dtype for name, spec in adapter.specs.items() if name in local_state}
        with reporting_dead_ranks(GATHER):
            for dtypes in gather_over(stages, own_dtypes):
                self.adapter = self.adapter.with_dtypes(dtypes)
        specs = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in self.adapter.specs.items()
        }
        return lambda tensors, max_bytes: gathered(local_state, specs, tensors, self.mesh, max_bytes, buffers)


def _device_of(model: nn.Module) -> torch.device:
    return next(parameter.device for parameter in model.parameters())


def require_module(model: object, call: str) -> None:
    """Check that an argument is a model.

    Args:
        model: The argument.
        call: The right call, for the message.

    Raises:
        UnknownArgumentError: If it is something else, such as parameters or a folder.
    """
    if not isinstance(model, nn.Module):
        raise UnknownArgumentError(f"model is {type_shown(model)}, expected the model itself: call {call}")


def require_model(model: Any, call: str) -> None:
    """Check that an argument is a model of transformers or this library, which may be wrapped.

    Raises:
        UnknownArgumentError: See `require_module`.
        StateDictError: If there is no model of transformers inside.
    """
    require_module(model, call)
    model_inside(model)


def require_unsharded(model: Any, mesh: DeviceMesh, call: str) -> None:
    """Check that a model can be sharded: it is not wrapped by torch, and neither it nor a part of it is sharded.

    Layers that torch's `fully_shard` has sharded are allowed, unless `mesh` has `tp` or `ep`.

    Raises:
        UnknownArgumentError, StateDictError: See `require_model`.
        ShardingError: If it is wrapped or sharded.
    """
    require_model(model, call)
    if innermost(model, peft=False) is not model:
        wrapper, inner = class_name(model), class_name(model_inside(model))
        problem = Problem(ProblemKind.MESH, wrapper, f"wraps the {inner}; expected the {inner} itself")
        raise ShardingError("the model is wrapped", [problem], ["shard the model before you wrap or compile it"])
    sharded = {name: state for name, part in model.named_modules() if (state := vars(part).get("sharding")) is not None}
    problems = [
        Problem(ProblemKind.MESH, describe(sharding.mesh), f"is the mesh of {f'model.{name}' if name else 'the model'}")
        for name, sharding in sharded.items()
        if isinstance(sharding, Sharding)
    ]
    if not problems:
        problems = _sharded_by_torch(model, mesh)
    if problems:
        advice = ["load the model without a mesh, and call parallelize(model, mesh) once, with the complete model"]
        raise ShardingError("the model is sharded already", problems, advice)


def _sharded_by_torch(model: PreTrainedModel, mesh: DeviceMesh) -> list[Problem]:
    """Return the problem of a model that torch's `fully_shard` or `parallelize_module` has sharded."""
    called = {id(part) for part in (model, *models_to_decoder(model))}
    for name, part in model.named_modules():
        if isinstance(part, FSDPModule) and id(part) in called:
            subject = f"model.{name}" if name else "the model"
            return [Problem(ProblemKind.MESH, subject, "torch's fully_shard has sharded it")]
    dimensions = [name for name in ("tp", "ep") if name in (mesh.mesh_dim_names or ())]
    divided = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if dimensions and divided:
        detail = f"is a DTensor already, which {' and '.join(dimensions)} cannot divide again"
        return [Problem(ProblemKind.MESH, divided[0], detail)]
    return []


def sharding_of(model: nn.Module) -> Sharding:
    """Return the sharding state of a model. Call `sharded_model` first if the model may be wrapped.

    Raises:
        ShardingError: If it is not sharded.
    """
    sharding = getattr(model, "sharding", None)
    if sharding is None:
        problem = Problem(ProblemKind.MESH, class_name(model), "is not sharded")
        advice = (
            "load it with a mesh, or call nrl_models.distributed.parallelize(model, mesh), also on one rank: "
            'init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))'
        )
        raise ShardingError("the model has no mesh", [problem], [advice])
    return cast(Sharding, sharding)


def sharded_model(model: nn.Module) -> PreTrainedModel:
    """Return the sharded model inside the wrappers of PEFT and torch. Does not communicate.

    Raises:
        ShardingError: If it is not sharded, or a wrapper has parameters.
        StateDictError: If there is no model of transformers inside.
    """
    inner = model_inside(model)
    sharding_of(inner)
    if outside := parameters_outside(model, inner):
        path = next(name for name, module in model.named_modules() if module is inner)
        detail = f"is outside the sharded model, {path}"
        problems = [Problem(ProblemKind.UNEXPECTED, name, detail) for name in outside]
        advice = f"pass the sharded model itself, model.{path}, and save the others separately"
        raise ShardingError(f"{class_name(model)} is sharded only in part", problems, [advice])
    return inner


def _require_same_parameters(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    sharding = sharding_of(model)
    sharding.slots.require_same_parameters(model)
    sharding.slots.require_no_later_parameters(model)


def _fill_shards(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace unsharded tensors in a state dict before loading with DTensors that have this rank's shards of them.

    Does not communicate. Tensors with a wrong shape stay unchanged, and torch reports them.

    Raises:
        ShardingError: If parameters were replaced after sharding, see `require_no_replaced_parameters`.
    """
    sharding = sharding_of(model)
    sharding.slots.require_same_parameters(model)
    local_state, stored_names = own_state_dict(model), names_in_state_dict(model)
    tied, filled = tied_names(model), dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]()
    for name, target in sharding.adapter.transformers.items():
        if name not in local_state:
            if name not in sharding.names:  # of another stage
                state_dict.pop(prefix + name, None)
            continue
        key = prefix + stored_names[name]
        value, model_tensor = state_dict.get(key), local_state[name]
        if not isinstance(model_tensor, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == model_tensor.shape:
            one = tied.get(name, name), id(value)  # tied tensors stay tied
            if one not in filled:
                shard: torch.Tensor = torch.empty_like(model_tensor, dtype=value.dtype)
                for block in blocks_of(target, {name: shard}):
                    block.take_from(value)
                is_parameter = isinstance(value, nn.Parameter)
                filled[one] = value, nn.Parameter(shard, requires_grad=False) if is_parameter else shard
            state_dict[key] = filled[one][1]


def _retie(model: nn.Module, _: Any) -> None:
    retie(model)
