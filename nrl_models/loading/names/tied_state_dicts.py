"""Keep tied tensors tied when `load_state_dict` loads one or several of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nrl_models.common.modules import is_flattened, names_in_state_dict, own_parameters
from nrl_models.common.state_dict.ties import are_one_memory, have_same_values, tied_names, tying_keys
from nrl_models.errors import Problem, ProblemKind, StateDictError


def keep_ties(model: Any, state_dict: dict[str, Any], prefix: str, *, assign: bool) -> list[str]:
    """Give all names of a tied tensor the same value, in a state dict that torch is about to load.

    The state dict may have the tensor under one name, as files do, or the same memory under several. Separate tensors
    are unchanged.

    Args:
        model, state_dict, prefix: See `accept_hub_names`.
        assign: Whether torch replaces parameters (`assign=True`). Then one new parameter replaces the tied one. torch
            would create a parameter for each name, and optimizers would step their memory several times. Separate
            tensors untie the model.

    Returns:
        The added keys.

    Raises:
        StateDictError: If separate tensors differ and torch would copy them into the tied one, which keeps the last.
    """
    if is_flattened(model):
        return []
    added: list[str] = []
    groups: dict[str, list[str]] = {}
    for name, source_name in tied_names(model).items():
        groups.setdefault(source_name, [source_name]).append(name)
    stored_names, parameters = names_in_state_dict(model), dict(own_parameters(model, duplicates=True))
    for source_name, names in groups.items():
        keys = [f"{prefix}{stored_names[name]}" for name in names]
        value, *others = [state_dict[key] for key in keys if key in state_dict] or [None]
        if not isinstance(value, torch.Tensor):
            continue
        if not all(_are_one_memory(value, other) for other in others):
            if not assign:
                _require_equal(model, {name: state_dict.get(key) for name, key in zip(names, keys, strict=True)})
            continue
        if assign and source_name in parameters and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)  # torch copies requires_grad from the old parameter
        added += [key for key in keys if key not in state_dict]
        state_dict.update(dict.fromkeys(keys, value))
    return added


def _require_equal(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Check that separate tensors of a state dict for one tied tensor have the same values.

    torch reports other types and shapes. Tensors that only differ in sharding are not compared.

    Args:
        model: The model.
        values: Tensors of the state dict by the names of the tied tensor; the first one is the name in files.

    Raises:
        StateDictError: If they differ.
    """
    first, *others = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
    problems = []
    for name in others:
        value, other = values[first], values[name]
        comparable = value.shape == other.shape and not (value.is_meta or other.is_meta)
        comparable = comparable and isinstance(value, DTensor) == isinstance(other, DTensor)
        if comparable and not have_same_values(value, other.to(value.device)):
            detail = f"differs from {first}, and the model has one tensor for both"
            problems.append(Problem(ProblemKind.TIED, name, detail))
    if problems:
        keys = " and ".join(f"{key}=False" for key in tying_keys(model, values))
        advice = f"create the model with {keys} to keep both, or untie it: load_state_dict(state_dict, assign=True)"
        raise StateDictError("state dict does not fit the model", problems, [advice])


def _are_one_memory(first: torch.Tensor, second: Any) -> bool:
    """Apply `are_one_memory` to two tensors, or to the local shards of two DTensors."""
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        return are_one_memory(first.to_local(), second.to_local())
    return are_one_memory(first, second)
