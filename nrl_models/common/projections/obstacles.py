"""Reasons why the linears of a group run separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

KINDS = ("weight", "bias")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ObstacleKind(Enum):
    """Reason why linears are not fused."""

    REPLACED = "a linear was replaced"
    CLASS = "a linear is of another class"
    PARAMETER = "a parameter cannot share a buffer"
    UNLIKE = "linears differ in input size, dtype, device or bias"
    SHARED = "linears share a parameter"
    MOVED = "weights do not share one buffer"
    HOOK = "a linear has hooks"
    FORWARD = "a linear's forward was replaced"
    WRAPPED = "a linear is inside another module"
    TRAINING = "only some of the linears are trained"
    UNCALLED = "some of the linears are not called"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why the linears of a group run separately.

    Args:
        kind: Kind of the reason.
        message: The reason with names of linears.
    """

    kind: ObstacleKind
    message: str

    def __str__(self) -> str:
        return self.message


def difference_between(linears: Mapping[str, nn.Linear]) -> Obstacle | None:
    """Return the difference between linears that prevents one shared buffer; None if they are alike."""
    facts: dict[str, dict[str, Any]] = {
        "input size": {name: linear.weight.shape[1] for name, linear in linears.items()},
        "dtype": {name: linear.weight.dtype for name, linear in linears.items()},
        "device": {name: linear.weight.device for name, linear in linears.items()},
        "having a bias": {name: linear._parameters.get("bias") is not None for name, linear in linears.items()},
    }
    for attribute, values in facts.items():
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            return Obstacle(ObstacleKind.UNLIKE, f"linears disagree in {attribute}: {listed}")
    return None


def obstacle_to_calls(linears: Mapping[str, nn.Linear]) -> Obstacle | None:
    """Return which hook, replaced forward or frozen parameter requires separate calls; None if nothing does."""
    for name, linear in linears.items():
        if hooked := [kind for kind in HOOKS if linear.__dict__[kind]]:
            return Obstacle(ObstacleKind.HOOK, f"{name} has {hooked[0].strip('_').replace('_', ' ')}")
        if "forward" in linear.__dict__ or linear.__dict__.get("_compiled_call_impl") is not None:
            return Obstacle(ObstacleKind.FORWARD, f"the forward of {name} was replaced")
    for kind in KINDS:
        parameters = {name: linear._parameters.get(kind) for name, linear in linears.items()}
        learning = [name for name, parameter in parameters.items() if parameter is not None and parameter.requires_grad]
        if learning and len(learning) < len(linears):
            message = f"of some linears only the {kind} is trained: {', '.join(learning)}"
            return Obstacle(ObstacleKind.TRAINING, message)
    return None


def hooked_module(owner: nn.Module) -> str | None:
    """Return the name of a module inside the parent of a group that has forward hooks; None if none has.

    A hook between calls of the linears may change weights without detection (`weight.data.mul_(2)`).
    """
    for name, module in owner._modules.items():
        if module is None:
            continue
        if module._forward_hooks or module._forward_pre_hooks:
            return name
        if module._modules and (inside := hooked_module(module)):
            return f"{name}.{inside}"
    return None


def why_unfit(parameter: torch.Tensor, memory: torch.Tensor | None) -> str:
    """Return why a parameter with this memory cannot share a buffer; empty if it can."""
    if memory is None:
        return f"is a {type(parameter).__name__}"
    if memory.device.type == "meta":
        return "has no values (it is on meta)"
    if memory.is_inference():
        return "was made in inference mode"
    if memory.layout is not torch.strided or not memory.is_contiguous() or memory.numel() == 0:
        return "is not contiguous, or empty"
    return ""
