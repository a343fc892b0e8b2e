"""Optimizer states in transformers' layout, so that a run may go on combined, uncombined or in transformers.

An optimizer numbers parameters in the order it got them, and a combined model has fewer. Its states are
tensors of the parameters' shapes, so the adapter's views cut and join them like the weights themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nrl_models.common.state_dict_adapter import StateDictAdapter, widest
from nrl_models.common.views import HFTensor
from nrl_models.errors import Problem, StateDictError

State = dict[str, Any]
"""An optimizer's `state_dict()`, or what it holds for one parameter."""


def keep_in_transformers_layout(optimizer: Optimizer, model: PreTrainedModel) -> None:
    """Make `optimizer.state_dict()` and `load_state_dict()` those of an optimizer of the Hugging Face model.

    What it saves then loads in transformers, and what was saved there loads here; so does what was
    saved here without this. The optimizer itself stays as it is. With transformers' `Trainer`:

        trainer = Trainer(model=model, args=args, train_dataset=data)
        keep_in_transformers_layout(trainer.create_optimizer(), model)
        trainer.train(resume_from_checkpoint=checkpoint)

    For states that have an element for each of the parameter's (Adam, momentum), or one number for
    all. Others (Adafactor's rows and columns) differ between combined and separate weights, and are
    an error for parameters that are combined.

    Args:
        optimizer: of parameters of `model`, which each group holds in the order of `model.parameters()`.
        model: the model, not sharded.

    Raises:
        ValueError: the optimizer holds other tensors, or in another order; or the model is sharded, by then or later.
        StateDictError: on saving or loading, states that do not fit, all of them. Nothing is changed then.
    """
    _group_names(optimizer, model)
    optimizer.register_state_dict_post_hook(partial(_to_transformers, model=model))
    optimizer.register_load_state_dict_pre_hook(partial(_from_transformers, model=model))


def _to_transformers(optimizer: Optimizer, state_dict: State, *, model: PreTrainedModel) -> State | None:
    """The hook for `state_dict`."""
    adapter = StateDictAdapter(model)
    own = _group_names(optimizer, model)
    if _sizes(state_dict) != _lengths(own):
        return None  # by another hook of this kind
    states, problems = _by_name(state_dict, own), []
    separate = _separate(own, adapter)
    result: dict[str, State] = {}
    for name in (name for group in separate for name in group):
        tensor = adapter.transformers[name]
        kept = states.get(tensor.parameters[0])
        if kept is not None:
            result[name] = {key: _part(key, value, tensor, adapter, problems) for key, value in kept.items()}
    return _with(state_dict, separate, result, problems)


def _from_transformers(optimizer: Optimizer, state_dict: State, *, model: PreTrainedModel) -> State | None:
    """The hook for `load_state_dict`."""
    adapter = StateDictAdapter(model)
    own = _group_names(optimizer, model)
    separate = _separate(own, adapter)
    if _sizes(state_dict) == _lengths(own):
        return None
    if _sizes(state_dict) != _lengths(separate):
        detail = f"expected {_lengths(separate)} parameters as in transformers, or {_lengths(own)} combined"
        problem = Problem("shape", "the groups", f"have {_sizes(state_dict)}, {detail}")
        raise StateDictError(f"the state is not of this {type(optimizer).__name__}", [problem])
    states, problems = _by_name(state_dict, separate), []
    result: dict[str, State] = {}
    for name in (name for group in own for name in group):
        parts = [(one, states.get(one.name, {})) for one in adapter.tensors_in(name, "transformers")]
        if keys := dict.fromkeys(key for _, kept in parts for key in kept):
            result[name] = {key: _whole(name, key, parts, adapter, problems) for key in keys}
    return _with(state_dict, own, result, problems)


def _group_names(optimizer: Optimizer, model: PreTrainedModel) -> list[list[str]]:
    """The model's own names of the parameters in each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = {name: number for number, name in enumerate(names.values())}
    groups = [[names.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]
    if any(isinstance(one, DTensor) for group in optimizer.param_groups for one in group["params"]):
        raise ValueError(
            "the model is sharded, and so are its optimizer's states: nrl_models.distributed.save_checkpoint keeps "
            "them under Hugging Face names, accelerate under the model's own"
        )
    if unknown := sum(name is None for group in groups for name in group):
        raise ValueError(f"{unknown} tensors of the {type(optimizer).__name__} are no parameters of this model")
    if any(group != sorted(group, key=order.__getitem__) for group in groups):
        raise ValueError(
            "the optimizer's groups are not in the order of model.parameters(), so the order in which "
            "transformers would have them is not known"
        )
    return groups


def _separate(groups: list[list[str]], adapter: StateDictAdapter) -> list[list[str]]:
    """transformers' names of what is in each group, in the order of its `parameters()`."""
    table = {name: tensor.parameters[0] for name, tensor in adapter.transformers.items()}
    return [[name for name, own in table.items() if own in group] for group in map(set, groups)]


def _lengths(groups: list[list[str]]) -> list[int]:
    return [len(group) for group in groups]


def _sizes(state_dict: State) -> list[int]:
    return [len(group["params"]) for group in state_dict["param_groups"]]


def _by_name(state_dict: State, groups: list[list[str]]) -> dict[str, State]:
    """The states of a state dict by the names of its parameters; those that have none yet are left out."""
    pairs = zip((name for group in groups for name in group), _numbers(state_dict), strict=True)
    return {name: state_dict["state"][number] for name, number in pairs if number in state_dict["state"]}


def _numbers(state_dict: State) -> Iterator[int]:
    return (number for group in state_dict["param_groups"] for number in group["params"])


def _with(state_dict: State, groups: list[list[str]], states: dict[str, State], problems: list[Problem]) -> State:
    """A state dict of the same optimizer with other parameters and their states."""
    if problems:
        advice = ["such states cannot be cut or joined: go on with the same `combine` with which they were saved"]
        raise StateDictError("the optimizer's state cannot be translated", problems, advice)
    number = {name: number for number, name in enumerate(name for group in groups for name in group)}
    param_groups = []
    for names, group in zip(groups, state_dict["param_groups"], strict=True):
        named = {"param_names": names} if "param_names" in group else {}
        param_groups.append(group | {"params": [number[name] for name in names]} | named)
    return state_dict | {"state": {number[name]: states[name] for name in states}, "param_groups": param_groups}


def _part(key: str, value: Any, tensor: HFTensor, adapter: StateDictAdapter, problems: list[Problem]) -> Any:
    """What one entry of a parameter's state is for one of the tensors in it."""
    own = tensor.parameters[0]
    if tensor.view.steps and not _is_number(value):
        if tuple(value.shape) == adapter.own[own].shape:
            return tensor.read({own: value})
        problems.append(_not_elementwise(key, own, value))
    # Not shared: every parameter has a step of its own to count.
    return copy.deepcopy(value) if tensor.view.steps else value


def _whole(
    name: str, key: str, parts: list[tuple[HFTensor, State]], adapter: StateDictAdapter, problems: list[Problem]
) -> Any:
    """One entry of a parameter's state from those of the tensors in it."""
    if not parts[0][0].view.steps:
        return parts[0][1][key]
    absent = [tensor.name for tensor, kept in parts if key not in kept]
    if absent:
        problems.append(Problem("partial", f"{key} of {name}", f"is not there for {', '.join(absent)}"))
        return None
    values = [kept[key] for _, kept in parts]
    if all(_is_number(value) for value in values):
        if any(value != values[0] for value in values):
            found = ", ".join(f"{kept[key]} for {tensor.name}" for tensor, kept in parts)
            problems.append(Problem("partial", f"{key} of {name}", f"differs: {found}"))
        return values[0]
    for tensor, kept in parts:
        if _is_number(kept[key]) or tuple(kept[key].shape) != tensor.shape:
            problems.append(_not_elementwise(key, tensor.name, kept[key]))
            return None
    whole = values[0].new_empty(adapter.own[name].shape, dtype=widest(value.dtype for value in values))
    for tensor, kept in parts:
        tensor.write_into(name, whole, kept[key])
    return whole


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.ndim == 0


def _not_elementwise(key: str, name: str, value: Any) -> Problem:
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    return Problem("shape", f"{key} of {name}", f"has shape {shape}, neither the parameter's nor a single number's")
