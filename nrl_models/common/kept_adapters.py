"""A model's adapter, made once and kept until the model's structure changes.

torch tells of every module, parameter and buffer that is registered anywhere; so as long as it has told of none, no
kept adapter needs a look. After that the model's names, shapes and dtypes are compared with those of its adapter, which
costs what listing them costs, and only if they differ is another adapter made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PreTrainedModel

from nrl_models.common import layouts
from nrl_models.common.state_dict_adapter import StateDictAdapter

_registrations = 0


def _note(module: nn.Module, name: str, value: Any) -> None:
    global _registrations
    # A forward may register modules (transformers slices lists of layers): compiled, it is not to know of this.
    if not torch.compiler.is_compiling():
        _registrations += 1


for _register in (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
):
    _register(_note)


@dataclass(slots=True)
class _Kept:
    """An adapter, and what was true when it was last seen to fit its model."""

    adapter: StateDictAdapter
    registrations: int
    conversions: Any


_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def adapter_of(model: PreTrainedModel) -> StateDictAdapter:
    """The adapter of a model that is not sharded: the same object until the model's structure changes."""
    kept = _kept.get(model)
    conversions = getattr(model, "_weight_conversions", None)
    if kept is not None and kept.conversions is conversions:
        if kept.registrations == _registrations:
            return kept.adapter
        if kept.adapter.own == layouts.own_tensors(model) and kept.adapter.tied == layouts.tied_names(model):
            kept.registrations = _registrations
            return kept.adapter
    seen = _registrations  # before: making it registers nothing, but another thread may
    adapter = StateDictAdapter(model)
    _kept[model] = _Kept(adapter, seen, conversions)
    return adapter
