"""An optimiser's groups and states under the names of a sharded model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nrl_models.common.modules import own_parameters
from nrl_models.distributed.block_files import Held, StoredTensor
from nrl_models.distributed.manifest import Group, OptimizerFacts, States
from nrl_models.distributed.mesh import gather_over, has_stages
from nrl_models.distributed.sharding import sharding_of
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown


def facts_of(model: nn.Module, optimizer: Optimizer) -> OptimizerFacts:
    """All but the tensors. Every rank calls it.

    Raises:
        CheckpointError: a parameter that is not the model's, or a state that is neither a number nor a plain tensor of
            the parameter's shape; all of them.
    """
    parameters = _parameters(model, optimizer)
    problems = []
    states: dict[str, States] = {}
    for name, parameter in parameters.items():
        if not (state := optimizer.state.get(parameter)):
            continue
        states[name] = States({}, [])
        for key, value in state.items():
            if _is_scalar(value):
                states[name].scalars[key] = float(_plain(value))
            elif subclass := _subclass_of(value):
                detail = f"is a {subclass}, a tensor subclass whose content no other layout can read"
                advice = "use an optimizer with plain tensors as state, or save it with torch.distributed.checkpoint"
                problems.append(Problem(ProblemKind.FORMAT, f"{name}: {key}", detail, advice=advice))
            elif isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                states[name].tensors.append(key)
            else:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                detail = f"is {shape}, neither a scalar nor of the parameter's shape {tuple(parameter.shape)}"
                problems.append(Problem(ProblemKind.SHAPE, f"{name}: {key}", detail))
    if problems:
        raise CheckpointError("the optimiser's state cannot be saved", problems)
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [
        Group(
            {key: _plain(value) for key, value in group.items() if key != "params"},
            sorted(names[id(parameter)] for parameter in group["params"]),
        )
        for group in optimizer.param_groups
    ]
    return OptimizerFacts(groups, states)


def of_all_stages(facts: OptimizerFacts, mesh: DeviceMesh) -> OptimizerFacts:
    """The optimisers of all stages of a pipeline as one, from that of this rank's stages. Every rank calls it.

    Raises:
        CheckpointError: they have other groups, or other options; on every rank.
    """
    if not has_stages(mesh):
        return facts
    stages: list[OptimizerFacts] = gather_over(mesh["pp"], facts)
    options = [[group.options for group in stage.groups] for stage in stages]
    if problems := [
        Problem(ProblemKind.RANK, f"the optimiser of rank {rank} of pp", f"has groups {shown(theirs)}")
        for rank, theirs in enumerate(options)
        if theirs != options[0]
    ]:
        detail = f"has groups {shown(options[0])}"
        problems = [Problem(ProblemKind.RANK, "the optimiser of rank 0 of pp", detail), *problems]
        raise CheckpointError("the optimisers of a pipeline's stages differ in their groups or options", problems)
    groups = [
        Group(group.options, sorted({name for stage in stages for name in stage.groups[number].parameters}))
        for number, group in enumerate(facts.groups)
    ]
    return OptimizerFacts(groups, {name: states for stage in stages for name, states in stage.states.items()})


def held_states(model: PreTrainedModel, optimizer: Optimizer) -> list[Held]:
    """The tensors of an optimiser's states, called `{parameter}.{state}`."""
    layout = sharding_of(model).adapter.transformers
    return [
        Held(f"{name}.{key}", layout[name], {name: value.detach()})
        for name, parameter in _parameters(model, optimizer).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not _is_scalar(value)
    ]


def misfits(
    model: PreTrainedModel,
    optimizer: Optimizer,
    ours: OptimizerFacts,
    saved: OptimizerFacts | None,
    stored: Mapping[str, StoredTensor],
) -> list[Problem]:
    """What keeps a model's optimiser from taking what was saved of another.

    Args:
        model: a sharded model.
        optimizer: of its parameters.
        ours: its groups, `of_all_stages`.
        saved: the other's groups, and what states it had.
        stored: tensors of these states.
    """
    if saved is None:
        return [Problem(ProblemKind.MISSING, "optimizer", "was not saved: load the model without it")]
    parameters = _parameters(model, optimizer)
    groups = ours.groups
    problems = []
    if len(groups) != len(saved.groups):
        detail = f"has {len(saved.groups)} parameter groups, this optimiser {len(groups)}"
        problems.append(Problem(ProblemKind.UNEXPECTED, "optimizer", detail))
    for number, (own, theirs) in enumerate(zip(groups, saved.groups, strict=False)):
        here, there = set(own.parameters), set(theirs.parameters)
        where = f"is in group {number}"
        problems += [
            Problem(ProblemKind.MISSING, name, f"{where} here, and not there") for name in sorted(here - there)
        ]
        problems += [
            Problem(ProblemKind.UNEXPECTED, name, f"{where} there, and not here") for name in sorted(there - here)
        ]
        problems += _misfitting_options(number, own.options, theirs.options)
    wanted = {f"{name}.{key}": name for name, states in saved.states.items() for key in states.tensors}
    for state in sorted(wanted.keys() | stored.keys()):
        if state not in stored:
            problems.append(Problem(ProblemKind.MISSING, state, "is a state that was saved, and is in no file"))
        elif state not in wanted:
            problems.append(Problem(ProblemKind.UNEXPECTED, state, "is in a file, and no state that was saved"))
        elif (parameter := parameters.get(wanted[state])) is not None and stored[state].shape != parameter.shape:
            detail = f"has shape {stored[state].shape}, the parameter {tuple(parameter.shape)}"
            problems.append(Problem(ProblemKind.SHAPE, state, detail))
    return problems


def restore(
    model: PreTrainedModel, optimizer: Optimizer, saved: OptimizerFacts, stored: Mapping[str, StoredTensor]
) -> None:
    """Replace an optimiser's states and options by what was saved, in which there are no `misfits`."""
    for group, saved_group in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update({key: _retyped(group.get(key), value) for key, value in saved_group.options.items()})
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for name, parameter in _parameters(model, optimizer).items():
        if (kept := saved.states.get(name)) is None:
            continue
        device = _device_of_scalars(groups[id(parameter)], parameter)
        state: dict[str, Any] = {
            key: torch.tensor(value, dtype=torch.float32, device=device) for key, value in kept.scalars.items()
        }
        for key in kept.tensors:
            state[key] = torch.zeros_like(parameter.detach(), dtype=stored[f"{name}.{key}"].dtype)
        optimizer.state[parameter] = state
    for held in held_states(model, optimizer):
        stored[held.name].fill(held.blocks)


def _device_of_scalars(group: Mapping[str, Any], parameter: torch.Tensor) -> torch.device:
    """Where torch's `Optimizer.load_state_dict` puts `step`: fused and capturable kernels read it on the device."""
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def _misfitting_options(number: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Problem]:
    """Options of a group that are of another type there than here, and a learning rate that is not there."""
    problems = []
    if "lr" in ours and "lr" not in theirs:
        problems.append(Problem(ProblemKind.MISSING, f"lr of group {number}", "was not saved"))
    for key, value in theirs.items():
        here, there = _kind(ours.get(key)), _kind(value)
        if here not in (there, None) and (here, there) != ("switch", None):  # which is on, off, or left to torch
            detail = f"is {shown(value)} there, and {shown(ours[key])} here"
            problems.append(Problem(ProblemKind.DTYPE, f"{key} of group {number}", detail))
    return problems


def _kind(value: Any) -> Any:
    """What an option is, whatever its value."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, bool):
        return "switch"
    return "number" if isinstance(value, (int, float)) else None if value is None else type(value)


def _parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimiser's parameters by the model's own names.

    Raises:
        CheckpointError: a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in own_parameters(model)}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in names for parameter in given):
        detail = f"{foreign} of its {len(given)} parameters are not the model's: make it after the model is sharded"
        problem = Problem(ProblemKind.UNEXPECTED, "optimizer", detail)
        raise CheckpointError("the optimiser is not this model's", [problem])
    return {names[id(parameter)]: parameter for parameter in given}


def _subclass_of(value: Any) -> str:
    """The name of the tensor subclass that a state is, or that a DTensor holds; empty for plain tensors."""
    local = value.to_local() if isinstance(value, DTensor) else value
    is_plain = not isinstance(local, torch.Tensor) or type(local) in (torch.Tensor, nn.Parameter)
    return "" if is_plain else type(local).__name__


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _plain(value: Any) -> Any:
    """An option or a scalar as JSON takes it."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _retyped(current: Any, value: Any) -> Any:
    """An option as JSON has it, in the type of its current value."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value
