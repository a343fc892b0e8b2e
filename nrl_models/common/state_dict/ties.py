"""Find the tied tensors of a model, from its current memory and configuration.

Ties are not remembered from loading, because weights can be untied later: by hand, by merging PEFT adapters, by
resizing, or by quantization.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.modules import named_tensors, own_modules, without_wrappers
from nrl_models.common.upstream_conversions import remove_tied_weights_from_state_dict
from nrl_models.errors import Problem, ProblemKind, StateDictError

_PLAIN = (torch.Tensor, nn.Parameter)
"""Classes of tensors whose addresses are comparable."""


def declared_ties(model: nn.Module) -> dict[str, str]:
    """Return the ties of the current configuration: for each tensor, the name of the one that is saved instead.

    Args:
        model: A model, which may be wrapped. Tensors that it lacks are not in the result.
    """
    plain = without_wrappers(model)
    return _declared_ties(plain, {name for name, *_ in named_tensors(plain)})


def _declared_ties(plain: nn.Module, names: Set[str]) -> dict[str, str]:
    """Implement `declared_ties` for a model without wrappers and the names of its tensors."""
    if not isinstance(plain, PreTrainedModel):
        return {}
    try:
        ties = plain.get_expanded_tied_weights_keys(all_submodels=True)
    except ValueError:  # pattern of removed tensors: the other tensors were tied when the model was built
        ties = plain.all_tied_weights_keys
    return {name: saved_name for name, saved_name in ties.items() if {name, saved_name} <= names}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the current ties: those in `declared_ties` whose two names share memory.

    Ties are not remembered from loading, because weights can be untied later, by hand or by a library (PEFT's merge).
    For tensors on meta, the configuration decides.
    """
    tensors = {name: tensor for name, _, _, tensor in named_tensors(model)}
    if not _may_share_memory(tensors.values()):  # much faster than expanding the configuration's patterns
        return {}
    return {
        name: saved_name
        for name, saved_name in _declared_ties(without_wrappers(model), tensors.keys()).items()
        if tensors[name].is_meta or tensors[saved_name].is_meta or are_one_memory(tensors[name], tensors[saved_name])
    }


def _may_share_memory(tensors: Collection[torch.Tensor]) -> bool:
    """Return False if no two tensors are the same object or begin at the same address, and none is on meta."""
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.is_meta:
            return True
        has_address = type(tensor) in _PLAIN and tensor.layout is torch.strided
        address = tensor.data_ptr() if has_address else id(tensor)
        if address in seen:
            return True
        seen.add(address)
    return False


def are_one_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors are the same object, or plain tensors over the same memory.

    Addresses of other tensors, such as DTensors, are not comparable.
    """
    if first is second:
        return True
    if any(type(tensor) not in _PLAIN or tensor.is_meta for tensor in (first, second)):
        return False
    return first.numel() > 0 and _memory_of(first) == _memory_of(second)


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def with_separate_ties(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors to save without shared memory, so that transformers writes all of them.

    transformers leaves out tensors that share memory if the class can tie them, even if the configuration does not.
    The result has copies of these. Current ties are not in `tensors`.

    Args:
        model: The model.
        tensors: Tensors to save, without the second names of current ties.

    Raises:
        StateDictError: If some do, such as those of a layer that a model uses twice. Lists all of them.
    """
    names: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if type(tensor) in _PLAIN and tensor.numel() > 0 and not tensor.is_meta:
            names.setdefault(_memory_of(tensor), []).append(name)
    if not (shared := [group for group in names.values() if len(group) > 1]):
        return tensors
    try:
        written = remove_tied_weights_from_state_dict(dict(tensors), model)
    except RuntimeError as error:
        problems = [
            Problem(
                ProblemKind.TIED, name, f"is the same tensor as {first_name}, and the configuration does not tie them"
            )
            for first_name, *others in shared
            for name in others
        ]
        advice = (
            "save copies, save_pretrained(folder, state_dict={name: tensor.clone() for ...}), or copy the module first"
        )
        raise StateDictError(f"{type(model).__name__} shares tensors between names", problems, [advice]) from error
    return {name: tensor if name in written else tensor.clone() for name, tensor in tensors.items()}


def have_same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors have the same shape and values, as far as this rank has them; NaNs are equal."""
    if are_one_memory(first, second):
        return True
    if first.shape != second.shape:
        return False
    first, second = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (first, second))
    if first.shape != second.shape or first.is_meta or second.is_meta:
        return False
    dtype = torch.promote_types(first.dtype, second.dtype)
    first, second = first.to(dtype), second.to(dtype)
    return torch.equal(first, second) or (
        dtype.is_floating_point and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    )


def tying_keys(model: nn.Module, names: Iterable[str], *, tie: bool = True) -> list[str]:
    """Return the configuration's keys that decide on ties: `tie_word_embeddings`, `text_config.tie_word_embeddings`.

    Args:
        model: A model, which may be wrapped.
        names: Tensors that its classes may tie to others.
        tie: Current value of these keys.
    """
    plain = without_wrappers(model)
    configs = list(_configs(getattr(plain, "config", None), ""))
    keys: dict[str, None] = {}
    for prefix, module in own_modules(plain):
        if not isinstance(module, PreTrainedModel) or _ties(module.config) != tie:
            continue
        dot = f"{prefix}." if prefix else ""
        inside = [name.removeprefix(dot) for name in names if name.startswith(dot)]
        if any(re.match(pattern, name) for pattern in module._tied_weights_keys or () for name in inside):
            keys |= {f"{path}tie_word_embeddings": None for path, config in configs if config is module.config}
    return list(keys)


def as_keywords(keys: Iterable[str], value: bool) -> str:
    """Return configuration keys with a value as keywords of `from_pretrained`: `text_config={"tie_...": False}`."""
    keywords = []
    for key in keys:
        *parts, last = key.split(".")
        text = str(value)
        for part in reversed([*parts[1:], last] if parts else []):
            text = f'{{"{part}": {text}}}'
        keywords.append(f"{parts[0] if parts else last}={text}")
    return ", ".join(keywords)


@contextmanager
def ties_as_read(model: PreTrainedModel) -> Iterator[None]:
    """Adjust a model's configuration while it is written, so that reading it results in the same ties.

    When they are read, some classes derive the `tie_word_embeddings` of one part from another's. For example,
    Qwen2.5-VL applies `True` in `text_config` to the complete model. If that would change a key, the keys without
    effect on this model get the value of the effective ones.
    """
    parts = {path: part for path, part in _configs(model.config, "") if hasattr(part, "tie_word_embeddings")}
    changed: list[Any] = []
    if len({_ties(part) for part in parts.values()}) > 1:
        read = dict(_configs(type(model.config).from_dict(model.config.to_dict()), ""))
        if any(_ties(read.get(path)) != _ties(part) for path, part in parts.items()):
            classes = [part for _, part in own_modules(model) if isinstance(part, PreTrainedModel)]
            decisive = {id(part.config): part.config for part in classes if part._tied_weights_keys}
            ties = any(map(_ties, decisive.values()))
            changed = [part for part in parts.values() if id(part) not in decisive and _ties(part) != ties]
    for part in changed:
        part.tie_word_embeddings = not part.tie_word_embeddings
    try:
        yield
    finally:
        for part in changed:
            part.tie_word_embeddings = not part.tie_word_embeddings


def _ties(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _configs(config: Any, path: str) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield a configuration and its sub-configurations, each with the prefix of its keys."""
    if isinstance(config, PreTrainedConfig):
        yield path, config
        for name in config.sub_configs:
            yield from _configs(getattr(config, name, None), f"{path}{name}.")
