"""Check keywords of a model's forward, which its `**kwargs` would ignore."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers.utils import TransformersKwargs

from nrl_models.common.config.spelling import misspellings_of
from nrl_models.common.modules import class_name
from nrl_models.errors import UnknownArgumentError, suggestion

_READ_BY_TRANSFORMERS = {*TransformersKwargs.__annotations__, "deterministic", "return_dict"}
"""Keywords that code around a model's modules reads: decorators, and functions of attention."""


def require_spelling(model: nn.Module, inputs: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check that keywords of a model's forward are not misspelled arguments, which its `**kwargs` would ignore.

    Also raises for numbers, strings and settings that no module reads. Tensors of a processor may have no effect.

    Raises:
        UnknownArgumentError: If one is.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in inputs:
        if name in parameters:
            continue
        if close := misspellings_of(name, known):
            raise UnknownArgumentError(f"unknown argument {name}{suggestion(close)}")
        if isinstance(inputs[name], str | int | float) and not _reads(model, name):
            raise UnknownArgumentError(f"unknown argument {name}: no module of {class_name(model)} reads it")


def _reads(model: nn.Module, name: str) -> bool:
    """Return True if the forward of a module has a parameter of this name, or reads it from its `**kwargs`."""
    if name in _READ_BY_TRANSFORMERS:
        return True
    forwards = [inspect.unwrap(kind.forward) for kind in {type(module) for module in model.modules()}]
    return any(
        name in (*code.co_varnames, *code.co_consts)
        for forward in forwards
        if (code := getattr(forward, "__code__", None)) is not None
    )
