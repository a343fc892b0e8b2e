"""Calls of groups of projections, derived from the calls of their linears."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nrl_models.common.projections import declared_groups
from nrl_models.engines.engine_types import ModuleCall


def with_groups(model: nn.Module, calls: Mapping[str, ModuleCall]) -> dict[str, ModuleCall]:
    """Add a call for each group of projections, because engines have a single linear in its place.

    Args:
        model: The model.
        calls: Calls of its modules by name, in order.
    """
    groups: dict[str, tuple[str, list[str]]] = {}
    for owner, name, linears in declared_groups(model):
        parts = [f"{owner}.{linear}" for linear in linears]
        if all(part in calls for part in parts):
            groups[min(parts, key=list(calls).index)] = f"{owner}.{name}", parts
    result: dict[str, ModuleCall] = {}
    for name, call in calls.items():
        result[name] = call
        if name in groups:
            group_name, parts = groups[name]
            outputs = torch.cat([calls[part].outputs[0] for part in parts], -1)
            result[group_name] = ModuleCall("LinearGroup", call.inputs, (outputs,))
    return result
