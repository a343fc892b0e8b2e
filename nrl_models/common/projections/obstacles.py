"""Reasons why the linears of a group run separately."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
