"""Why the linears of a group compute themselves, where they do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ObstacleKind(Enum):
    """What keeps linears from being computed in one matmul."""

    REPLACED = "a linear was replaced"
    CLASS = "a linear is of another class"
    PARAMETER = "a parameter cannot lie beside others"
    UNLIKE = "linears differ in input size, dtype, device or bias"
    SHARED = "linears share a parameter"
    MOVED = "weights are not side by side in memory"
    HOOK = "a linear has hooks"
    FORWARD = "a linear's forward was replaced"
    WRAPPED = "a linear is inside another module"
    TRAINING = "only some of the linears are trained"
    UNCALLED = "some of the linears are not called"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps the linears of one group from being computed in one matmul.

    Args:
        kind: what sort of obstacle it is.
        message: the same with names: which linear, and how.
    """

    kind: ObstacleKind
    message: str

    def __str__(self) -> str:
        return self.message
