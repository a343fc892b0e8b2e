"""Parameters that keep their dtype under FSDP, as transformers keeps them: routers, state-space decays, some norms.

FSDP requires one dtype per group of parameters, and forms a group per process group. In each unit, the kept parameters
therefore use a second process group over the same ranks, with a policy that does not cast.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from nrl_models.common.dtypes import dtype_name, kept_dtypes
from nrl_models.common.upstream_torch import FSDPMeshInfo, ShardPlacementResult, param_groups_of, set_policy
from nrl_models.distributed.parallel_plan import ParallelPlan
from nrl_models.errors import Problem, ProblemKind, ShardingError

_GROUP = "_nrl_kept_dtypes"
"""Attribute of a mesh with the second process group over `fsdp`."""


def kept_parameters(model: nn.Module, plan: ParallelPlan) -> dict[str, nn.Parameter]:
    """Return the parameters whose dtype during computation differs from that of most, by name.

    With `param_dtype`, these are the parameters that transformers keeps in another dtype when it loads the model in
    `param_dtype`. Without it, parameters compute in their own dtype, and FSDP requires one for those that are trained.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.is_floating_point()}
    if plan.param_dtype is not None:
        dtype_of = kept_dtypes(model, plan.param_dtype)
        return {name: weight for name, weight in weights.items() if dtype_of(name) not in (None, plan.param_dtype)}
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    counts = Counter(weight.dtype for weight in trained.values())
    usual = max(counts, key=lambda dtype: counts[dtype], default=None)
    return {name: weight for name, weight in trained.items() if weight.dtype != usual}


def separate_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a second process group over this rank's part of `fsdp`. The first call on a mesh is collective."""
    if _GROUP not in mesh.__dict__:
        ranks = dist.get_process_group_ranks(mesh.get_group("fsdp"))
        mesh.__dict__[_GROUP] = dist.new_group(ranks, use_local_synchronization=True)
    group: dist.ProcessGroup = mesh.__dict__[_GROUP]
    return group


class KeptApart:
    """Shard modules with FSDP, with the kept parameters in separate groups.

    Args:
        mesh: Mesh with the dimension `fsdp`.
        plan: Its `param_dtype` does not apply to the kept parameters.
        separate_parameters: See `kept_parameters`.

    Raises:
        ShardingError: If the installed torch has one group per unit.
    """

    def __init__(self, mesh: DeviceMesh, plan: ParallelPlan, separate_parameters: dict[str, nn.Parameter]) -> None:
        if FSDPMeshInfo is None:
            name, weight = next(iter(separate_parameters.items()))
            detail = (
                f"stays in {dtype_name(weight.dtype)}, as do {len(separate_parameters) - 1} others, and torch "
                f"{torch.__version__} requires one dtype for all parameters under fsdp: install a newer torch (2.13 "
                "and 2.15 were tested), or load with dtype=torch.float32 and no param_dtype"
            )
            raise ShardingError("cannot shard the model", [Problem(ProblemKind.PLAN, name, detail)])
        self.info: Any = copy.copy(FSDPMeshInfo(mesh["fsdp"], shard_mesh_dim=0))
        self.info.shard_process_group = separate_group(mesh)
        self.policy = MixedPrecisionPolicy(reduce_dtype=plan.reduce_dtype, cast_forward_inputs=False)
        self.ids = {id(parameter) for parameter in separate_parameters.values()}

    def placed(self, placement: Callable[[nn.Parameter], Shard | None]) -> Callable[[nn.Parameter], Any]:
        """Return `fully_shard`'s `shard_placement_fn` that moves the kept parameters into their own group."""

        def place(parameter: nn.Parameter) -> Any:
            shard = placement(parameter)
            return ShardPlacementResult(shard, self.info) if id(parameter) in self.ids else shard

        return place

    def policy_of(self, unit: nn.Module, policy: MixedPrecisionPolicy, is_root: bool) -> MixedPrecisionPolicy:
        """Return the policy of a unit.

        The root does not cast its inputs, because images may go to a module in fp32: the model casts, as in one
        process. A unit of only kept parameters casts nothing.
        """
        if is_root:
            return replace(policy, cast_forward_inputs=False)
        return self.policy if all(id(parameter) in self.ids for parameter in unit.parameters()) else policy

    def keep(self, unit: FSDPModule) -> None:
        """Set the policy of a unit's kept parameters."""
        for group in param_groups_of(unit):
            if group.mesh_info is self.info:
                set_policy(group, self.policy)
