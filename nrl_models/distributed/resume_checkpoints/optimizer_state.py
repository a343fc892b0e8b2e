"""An optimizer's groups and states under the names of a sharded model's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.modules import own_parameters
from nrl_models.distributed.mesh import gather_over, has_stages
from nrl_models.distributed.resume_checkpoints.block_files import BlockedTensor, HeldTensor
from nrl_models.distributed.resume_checkpoints.manifest import OptimizerFacts, ParameterGroup, States
from nrl_models.distributed.resume_checkpoints.scalars import Scalar
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import full_of
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnknownArgumentError, listed, shown, type_shown

NO_OPTIONS = ("params", "param_names")
"""Entries of a group that depend on the layout. Torch adds `param_names` for `Optimizer(model.named_parameters())`."""


def require_optimizer(optimizer: Any) -> None:
    """Check that an argument is an optimizer, or None: an object with parameter groups and states.

    Raises:
        UnknownArgumentError: If it is something else, such as a learning-rate scheduler, a list or a class.
    """
    if optimizer is None or (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        return
    advice = "pass the optimizer itself, or None to leave it out"
    if isinstance(optimizer, LRScheduler):
        advice = "pass scheduler.optimizer, and put scheduler.state_dict() into progress"
    elif isinstance(optimizer, (list, tuple, set)):
        advice = "pass one optimizer, with a parameter group for each of several"
    raise UnknownArgumentError(f"optimizer is {type_shown(optimizer)}, expected a torch.optim.Optimizer: {advice}")


def facts_of(model: nn.Module, optimizer: Optimizer) -> OptimizerFacts:
    """Return groups, options and scalar states of an optimizer. Every rank has to call this.

    Raises:
        CheckpointError: If a parameter is not the model's, a state is neither a number nor a plain tensor of the
            parameter's shape, or an option is a tensor with several elements. Lists all of them.
    """
    parameters = _parameters(model, optimizer)
    problems = []
    states: dict[str, States] = {}
    for name, parameter in parameters.items():
        if not (state := optimizer.state.get(parameter)):
            continue
        states[name] = States({}, [])
        for key, value in state.items():
            if _is_scalar(key, value, parameter):
                states[name].scalars[key] = Scalar.of(value)
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
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in NO_OPTIONS and isinstance(value, torch.Tensor) and value.numel() != 1:
                detail = f"is a tensor of shape {tuple(value.shape)}; expected a number"
                problems.append(Problem(ProblemKind.SHAPE, f"{key} of group {number}", detail))
    if problems:
        raise CheckpointError("the optimizer cannot be saved", problems)
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [
        ParameterGroup(
            {key: _plain(value) for key, value in group.items() if key not in NO_OPTIONS},
            sorted(names[id(parameter)] for parameter in group["params"]),
        )
        for group in optimizer.param_groups
    ]
    return OptimizerFacts(groups, states)


def of_all_stages(facts: OptimizerFacts, mesh: DeviceMesh) -> OptimizerFacts:
    """Merge the optimizers of all pipeline stages into one. Every rank has to call this.

    Raises:
        CheckpointError: On every rank, if the stages' groups or options differ.
    """
    if not has_stages(mesh):
        return facts
    stages: list[OptimizerFacts] = gather_over(mesh["pp"], facts)
    options = [[group.options for group in stage.groups] for stage in stages]
    if problems := [
        Problem(ProblemKind.RANK, f"the optimizer of rank {rank} of pp", f"has groups {shown(theirs)}")
        for rank, theirs in enumerate(options)
        if theirs != options[0]
    ]:
        detail = f"has groups {shown(options[0])}"
        problems = [Problem(ProblemKind.RANK, "the optimizer of rank 0 of pp", detail), *problems]
        raise CheckpointError("the optimizers of a pipeline's stages differ in their groups or options", problems)
    groups = [
        ParameterGroup(group.options, sorted({name for stage in stages for name in stage.groups[number].parameters}))
        for number, group in enumerate(facts.groups)
    ]
    return OptimizerFacts(groups, {name: states for stage in stages for name, states in stage.states.items()})


def held_states(model: PreTrainedModel, optimizer: Optimizer) -> list[HeldTensor]:
    """Return the tensors of an optimizer's states, with names `{parameter}.{state}`."""
    layout = sharding_of(model).adapter.transformers
    return [
        HeldTensor(f"{name}.{key}", layout[name], {name: value.detach()})
        for name, parameter in _parameters(model, optimizer).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not _is_scalar(key, value, parameter)
    ]


def misfits(
    model: PreTrainedModel,
    optimizer: Optimizer,
    ours: OptimizerFacts,
    saved: OptimizerFacts | None,
    stored: Mapping[str, BlockedTensor],
) -> list[Problem]:
    """Return the reasons why saved states cannot be loaded into a model's optimizer.

    Args:
        model: A sharded model.
        optimizer: Optimizer of the model's parameters.
        ours: Groups of the optimizer, from `of_all_stages`.
        saved: Groups and names of the saved states.
        stored: Tensors of the saved states.
    """
    if saved is None:
        return [Problem(ProblemKind.MISSING, "optimizer", "was not saved: load the model without it")]
    parameters = _parameters(model, optimizer)
    groups = ours.groups
    problems = []
    if len(groups) != len(saved.groups):
        detail = f"has {len(saved.groups)} parameter groups, this optimizer {len(groups)}"
        problems.append(Problem(ProblemKind.UNEXPECTED, "optimizer", detail))
    for number, (group, saved_group) in enumerate(zip(groups, saved.groups, strict=False)):
        here, there = set(group.parameters), set(saved_group.parameters)
        where = f"is in group {number}"
        problems += [
            Problem(ProblemKind.MISSING, name, f"{where} here, and not there") for name in sorted(here - there)
        ]
        problems += [
            Problem(ProblemKind.UNEXPECTED, name, f"{where} there, and not here") for name in sorted(there - here)
        ]
        problems += _misfitting_options(number, group.options, saved_group.options)
    wanted = {f"{name}.{key}": name for name, states in saved.states.items() for key in states.tensors}
    for state in sorted(wanted.keys() | stored.keys()):
        if state not in stored:
            problems.append(Problem(ProblemKind.MISSING, state, "was saved as a state, but is in no file"))
        elif state not in wanted:
            problems.append(Problem(ProblemKind.UNEXPECTED, state, "is in a file, but is not a saved state"))
        elif (parameter := parameters.get(wanted[state])) is not None and stored[state].shape != parameter.shape:
            detail = f"has shape {stored[state].shape}, the parameter {tuple(parameter.shape)}"
            problems.append(Problem(ProblemKind.SHAPE, state, detail))
    return problems


def narrowed(
    model: PreTrainedModel, optimizer: Optimizer, saved_dtypes: Mapping[str, torch.dtype]
) -> Iterator[Problem]:
    """Yield the trained parameters that the model would round, because they were saved in a wider dtype."""
    names: dict[tuple[torch.dtype, torch.dtype], list[str]] = defaultdict(list)
    for name, parameter in _parameters(model, optimizer).items():
        saved = saved_dtypes.get(name, parameter.dtype)
        if torch.promote_types(saved, parameter.dtype) != parameter.dtype:
            names[saved, parameter.dtype].append(name)
    for (saved, dtype), of_dtype in names.items():
        detail = f"saved in {dtype_name(saved)}, and {dtype_name(dtype)} in the model, which would round the values"
        advice = f"load the model with dtype={saved}; without an optimizer, load_checkpoint rounds the weights"
        yield Problem(ProblemKind.DTYPE, listed(of_dtype, limit=8), detail, advice=advice)


def restore(
    model: PreTrainedModel,
    optimizer: Optimizer,
    saved: OptimizerFacts,
    stored: Mapping[str, BlockedTensor],
    saved_dtypes: Mapping[str, torch.dtype],
) -> None:
    """Load saved states and options into an optimizer, replacing its own.

    Call only if `misfits` and `narrowed` return nothing. States that had the dtype of their parameter get its current
    dtype, as a new optimizer has it. Other states keep their dtype.
    """
    for group, saved_group in zip(optimizer.param_groups, saved.groups, strict=True):
        options = {key: value for key, value in saved_group.options.items() if key not in NO_OPTIONS}
        group.update({key: _retyped(group.get(key), value) for key, value in options.items()})
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    layout = sharding_of(model).adapter.transformers
    for name, parameter in _parameters(model, optimizer).items():
        if (saved_state := saved.states.get(name)) is None:
            continue
        group = groups[id(parameter)]
        # As in torch's `load_state_dict`: fused and capturable kernels read `step` on the GPU.
        device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        state: dict[str, Any] = {key: scalar.restored(device) for key, scalar in saved_state.scalars.items()}
        for key in saved_state.tensors:
            tensor = stored[f"{name}.{key}"]
            dtype = parameter.dtype if tensor.dtype == saved_dtypes.get(name) else tensor.dtype
            state[key] = torch.zeros_like(parameter.detach(), dtype=dtype)
            tensor.fill(HeldTensor(f"{name}.{key}", layout[name], {name: state[key]}).blocks)
        optimizer.state[parameter] = state


def _misfitting_options(number: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Problem]:
    """Find options of a saved group with another type, and a missing learning rate."""
    problems = []
    if "lr" in ours and "lr" not in theirs:
        problems.append(Problem(ProblemKind.MISSING, f"lr of group {number}", "was not saved"))
    for key, value in theirs.items():
        here, there = _kind(ours.get(key)), _kind(value)
        if here not in (there, None) and (here, there) != ("switch", None):  # a switch is on, off, or left to torch
            detail = f"is {shown(value)} there, and {shown(ours[key])} here"
            problems.append(Problem(ProblemKind.DTYPE, f"{key} of group {number}", detail))
    return problems


def _kind(value: Any) -> Any:
    """Return the type of an option, independent of its value."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, bool):
        return "switch"
    return "number" if isinstance(value, (int, float)) else None if value is None else type(value)


def _parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by the model's own names.

    Raises:
        CheckpointError: If a parameter is not the model's.
    """
    names = {id(parameter): name for name, parameter in own_parameters(model)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in names for parameter in parameters):
        detail = (
            f"{foreign} of its {len(parameters)} parameters are not the model's: make it after the model is sharded"
        )
        problem = Problem(ProblemKind.UNEXPECTED, "optimizer", detail)
        raise CheckpointError("the optimizer is not this model's", [problem])
    return {names[id(parameter)]: parameter for parameter in parameters}


def _subclass_of(value: Any) -> str:
    """Return the name of a state's tensor subclass, or of a DTensor's local tensor; empty for plain tensors."""
    local = value.to_local() if isinstance(value, DTensor) else value
    is_plain = not isinstance(local, torch.Tensor) or type(local) in (torch.Tensor, nn.Parameter)
    return "" if is_plain else type(local).__name__


def _is_scalar(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return True for numbers, except tensors of the shape of a 0-dimensional parameter, which are stored as tensors.

    Such a tensor is sharded exactly if the parameter is, and is not named `step`: optimizers count steps in 0
    dimensions.
    """
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | float)
    has_shape = parameter.ndim == 0 and isinstance(value, DTensor) == isinstance(parameter, DTensor)
    return value.ndim == 0 and not (has_shape and key != "step")


def _plain(value: Any) -> Any:
    """Convert an option or a scalar for JSON."""
    if isinstance(value, torch.Tensor):
        return full_of(value).item()
    return list(value) if isinstance(value, tuple) else value


def _retyped(current: Any, value: Any) -> Any:
    """Convert an option from JSON to the type of its current value."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value
