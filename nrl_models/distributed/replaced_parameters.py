"""Parameters of a sharded model that were replaced or removed after sharding.

Without a check, replacing one is silent: FSDP writes its own parameter back when it gathers the weights of a forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nrl_models.common.modules import class_name, own_name
from nrl_models.common.upstream_torch import ShardedParameter, sharded_parameters
from nrl_models.errors import Problem, ProblemKind, ShardingError


def require_no_replaced_parameters(model: nn.Module, is_divided: Mapping[nn.Module, Mapping[str, bool]]) -> None:
    """Check that a sharded model has the parameters that it had when it was sharded. Does not communicate.

    Args:
        model: A sharded model.
        is_divided: Whether each parameter was a DTensor before `fsdp` was applied, by module and attribute.

    Raises:
        ShardingError: If parameters were replaced or removed. Lists all their names.
    """
    problems = list(_replaced_parameters(model, is_divided))
    if problems:
        raise ShardingError(
            f"{class_name(model)} has changed since it was sharded",
            problems,
            [
                "load the model without a mesh, replace or untie the weights, and then call "
                "nrl_models.distributed.parallelize(model, mesh). To change the values of a sharded weight, call "
                "model.load_state_dict({name: tensor}, strict=False)"
            ],
        )


_REPLACED = "replaced_by_sharding"
"""Attribute of parameters that sharding has replaced."""


def mark_replaced(before: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Let optimizers that have parameters from before sharding raise in their next step, which would change nothing.

    Args:
        before: Parameters of the model before it was sharded.
        model: The sharded model.
    """
    current = set(map(id, model.parameters()))
    for parameter in before:
        if id(parameter) not in current:
            setattr(parameter, _REPLACED, True)
    _check_optimizers()


@cache
def _check_optimizers() -> None:
    register_optimizer_step_pre_hook(_require_current_parameters)


def _require_current_parameters(optimizer: Optimizer, *_: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if count := sum(hasattr(parameter, _REPLACED) for parameter in parameters):
        detail = f"has {count} parameters that sharding replaced, and would train them instead of the model's"
        problem = Problem(ProblemKind.RANK, type(optimizer).__name__, detail)
        raise ShardingError(
            "the optimizer is older than the sharded model",
            [problem],
            ["create the optimizer after nrl_models.distributed.parallelize(model, mesh)"],
        )


def retie(model: nn.Module) -> None:
    """Tie weights again that `load_state_dict(assign=True)` replaced one by one, as FSDP does in the next forward."""
    for sharded in _of_fsdp(model):
        for module, attribute in sharded.slots[1:]:
            if isinstance(module._parameters.get(attribute), DTensor):
                module._parameters[attribute] = sharded.current


def _of_fsdp(model: nn.Module) -> Iterator[ShardedParameter]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from sharded_parameters(module)


def _replaced_parameters(model: nn.Module, is_divided: Mapping[nn.Module, Mapping[str, bool]]) -> Iterator[Problem]:
    module_names = {id(module): own_name(prefix) for prefix, module in model.named_modules()}

    def name_of(module: nn.Module, attribute: str) -> str:
        module_name = module_names[id(module)]
        return f"{module_name}.{attribute}" if module_name else attribute

    def problem(module: nn.Module, attribute: str, effect: str) -> Problem:
        change = "removed" if module._parameters.get(attribute) is None else "replaced"
        return Problem(ProblemKind.RANK, name_of(module, attribute), f"was {change} after sharding: {effect}")

    in_fsdp: set[tuple[int, str]] = set()
    for sharded in _of_fsdp(model):
        in_fsdp |= {(id(module), attribute) for module, attribute in sharded.slots}
        slots = [(module, attribute) for module, attribute in sharded.slots if id(module) in module_names]
        first, effect = sharded.slots[0], "FSDP restores the sharded weight in the next forward"
        known: tuple[nn.Parameter | None, ...] = sharded.known
        if _is_adopted(sharded) and first in slots:
            known = (first[0]._parameters[first[1]],)
            effect = f"FSDP ties it to {name_of(*first)} again in the next forward"
        for module, attribute in slots:
            parameter = module._parameters.get(attribute)
            if not any(parameter is each for each in known):
                yield problem(module, attribute, effect)
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor) or (id(module), attribute) in in_fsdp:
                continue
            if is_divided.get(module, {}).get(attribute):
                yield problem(module, attribute, "expected a DTensor, because each rank computes with its shard")


def _is_adopted(sharded: ShardedParameter) -> bool:
    """Return True if FSDP takes over another parameter in the first slot: before its first use, if sharded alike."""
    module, attribute = sharded.slots[0]
    parameter, fsdp_parameter = module._parameters.get(attribute), cast(DTensor, sharded.current)
    if sharded.is_used or not isinstance(parameter, DTensor):
        return False
    layout = parameter.device_mesh, parameter.placements, parameter.shape
    return layout == (fsdp_parameter.device_mesh, fsdp_parameter.placements, fsdp_parameter.shape)
