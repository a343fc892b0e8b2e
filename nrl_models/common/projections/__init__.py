"""Fuse linears that share an input into one matmul; their weights share one buffer."""

from nrl_models.common.projections.combined import (
    KNOWN_GROUPS,
    CombinedGateUp,
    CombinedProjections,
    CombinedQKV,
    combine,
    combine_groups,
    combined_name,
    declared_groups,
    groups_of,
)
from nrl_models.common.projections.group import LinearGroup
from nrl_models.common.projections.group_report import GroupReport, join, neighboring_parameters, report
from nrl_models.common.projections.memory import Buffer, own_storage
from nrl_models.common.projections.obstacles import Obstacle, ObstacleKind

__all__ = [
    "KNOWN_GROUPS",
    "Buffer",
    "CombinedGateUp",
    "CombinedProjections",
    "CombinedQKV",
    "GroupReport",
    "LinearGroup",
    "Obstacle",
    "ObstacleKind",
    "combine",
    "combine_groups",
    "combined_name",
    "declared_groups",
    "groups_of",
    "join",
    "neighboring_parameters",
    "own_storage",
    "report",
]
