"""Allowed values of `_target_` in a recipe, and values that may only be set on the command line.

A recipe may be from an untrusted source, and a callable that it names could run any code. So a file may only name the
callables listed here. The user can allow others on the command line (`reward._target_=my_package.exact`). The same
applies to values that make a library run code or write files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from nrl_models.common.config.spelling import misspellings_of
from nrl_models.errors import shown, suggestion
from nrl_models.recipes.parsing.value_types import NOTHING, converted, mismatch


@dataclass(frozen=True, slots=True)
class Slot:
    """Allowed targets in one place of a recipe.

    Args:
        listed: Names that `_target_` may have in a file.
        positional: Values that the run passes by position. The names of the parameters do not matter.
        keywords: Keywords that the run passes.
    """

    listed: tuple[str, ...]
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def filled(self, function: Callable[..., Any]) -> set[str]:
        """Return the names of a callable's parameters that the run fills."""
        return {*_positional_parameters(function)[: len(self.positional)], *self.keywords}


_TEXT = (
    "nrl_models.AutoModelForCausalLM.from_pretrained",
    "nrl_models.AutoModelForImageTextToText.from_pretrained",
    "nrl_models.AutoModelForMultimodalLM.from_pretrained",
)

CLASSIFIER = "nrl_models.AutoModelForSequenceClassification.from_pretrained"
"""Target that loads reward models."""

SLOTS: Mapping[str, Slot] = {
    "model": Slot((*_TEXT, CLASSIFIER), positional=("path_or_id",), keywords=("backend",)),
    "data": Slot(("nrl_models.recipes.rows.rows", "nrl_models.recipes.sums.sums")),
    "optimizer": Slot(("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD"), positional=("params",)),
    "reward": Slot(
        ("nrl_models.recipes.reward_rules.last_number", "nrl_models.recipes.reward_rules.boxed"),
        positional=("row", "completion", "ended"),
    ),
}
"""By key of the recipe."""

SAFE_LOADING = (
    "combine",
    "device",
    "device_map",
    "dtype",
    "ignore_config_keys",
    "key_mapping",
    "local_files_only",
    "max_memory",
    "pretrained_model_name_or_path",
    "revision",
    "strict",
    "subfolder",
    "torch_dtype",
    "variant",
)
"""Options of `from_pretrained` that a file may have; the others run code, name secrets or write files."""

SAFE_ENGINE = (
    "device",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "max_num_seqs",
    "tensor_parallel_size",
)
"""Options of engines that a file may have; some others name code (`worker_cls`), or a program to start (`python`)."""

ENGINE_OPTIONS_OF_A_RUN: Mapping[str, str] = {
    "name": "engine.name",
    "path": "model.pretrained_model_name_or_path",
    "dtype": "engine.dtype",
    "max_length": "training.max_prompt and training.new_tokens",
    "seed": "seed",
}
"""Keywords of `start_engine` that the run sets, and the keys of a recipe that they follow from."""


def resolved(name: str) -> Any:
    """Import a dotted name: an attribute of a module, or an attribute of that.

    Raises:
        ImportError: If the name does not exist.
    """
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        try:
            target: Any = import_module(".".join(parts[:size]))
        except ModuleNotFoundError as error:
            if error.name is not None and ".".join(parts[:size]).startswith(error.name):
                continue
            raise
        for attribute in parts[size:]:
            if not hasattr(target, attribute):
                raise ImportError(f"{'.'.join(parts[:size])} has no {'.'.join(parts[size:])}")
            target = getattr(target, attribute)
        return target
    raise ImportError(f"there is no module {parts[0]}")


def listed_arguments(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted keys of all arguments of the listed targets that a recipe has."""
    for part, slot in SLOTS.items():
        node = tree.get(part)
        if isinstance(node, Mapping) and (name := node.get("_target_")) in slot.listed:
            function = resolved(name)
            filled = slot.filled(function)
            yield from (f"{part}.{name}" for name in inspect.signature(function).parameters if name not in filled)


def _positional_parameters(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def problems_of_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], slot: Slot
) -> Iterator[tuple[str, str]]:
    """Yield a callable's unknown keywords, with the nearest known, and its missing keywords, each with the problem.

    `_target_` has a problem if the callable takes fewer positional arguments than the run passes.
    """
    parameters = inspect.signature(function).parameters
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if not variadic and (takes := len(_positional_parameters(function))) < len(slot.positional):
        yield "_target_", f"takes {takes} positional arguments; expected {', '.join(slot.positional)}"
    filled = slot.filled(function)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in filled
    ]
    for name in arguments:
        if name in filled:
            yield name, "is filled by the run itself"
        elif name not in known and not open_ended:
            hint = suggestion(misspellings_of(name, known))
            yield name, f"nothing reads it{hint}; expected some of {', '.join(known)}"
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in arguments:
            yield name, "is missing"


def problems_of_values(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keywords whose values a listed callable does not accept, with the found and the expected value.

    An optimizer is created for one parameter, because only torch has the ranges of its arguments.

    Args:
        function: A listed callable. Its type hints are correct.
        arguments: Keyword arguments that it has.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    wrong = {
        name: mismatch(parameters[name].annotation, value)
        for name, value in arguments.items()
        if converted(parameters[name].annotation, value) is NOTHING
    }
    yield from wrong.items()
    if isinstance(function, type) and not wrong:
        yield from _problems_of_optimizer(function, arguments)


def _problems_of_optimizer(kind: type, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield arguments that torch does not accept. Some are only accepted together: momentum and `nesterov`."""
    accepted: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for _ in arguments:
        reasons = {}
        for name in [name for name in arguments if name not in accepted]:
            try:
                kind([torch.empty(1)], **accepted, **{name: arguments[name]})
                accepted[name] = arguments[name]
            except (TypeError, ValueError, RuntimeError) as error:
                reasons[name] = str(error)
    for name, reason in reasons.items():
        yield name, f"is {shown(arguments[name])}, which {kind.__name__} does not accept: {reason}"
