"""Parse the sizes of a mesh from a command line. Has no heavy imports."""

from __future__ import annotations

import math

from nrl_models.errors import Problem, ProblemKind, ShardingError, did_you_mean

DIMENSIONS = ("pp", "fsdp", "ep", "tp")
"""Dimensions of a mesh, in the required order.

`pp`: pipeline stages of layers. `fsdp`: fully sharded data parallelism; parameters and batches are split. `ep`: experts
are split. `tp`: rows and columns of linears are split. Ranks that differ only in `pp`, `ep` and `tp` process the same
batch.
"""

MOST_RANKS = 2**20
"""More than any cluster has."""


def parse_mesh(text: str) -> dict[str, int]:
    """Parse a string such as `"fsdp=16,tp=8"`. Returns sizes by dimension, in the order of meshes.

    Raises:
        ShardingError: If the string is invalid.
    """
    sizes: dict[str, int] = {}
    problems = []
    for item in text.split(","):
        name, _, size = item.strip().partition("=")
        if name in DIMENSIONS and name not in sizes and size.removeprefix("-").isdecimal() and int(size) < 1:
            advice = "write a positive size, or leave the dimension out"
            problems.append(Problem(ProblemKind.MESH, repr(item), "expected a size of at least 1", advice=advice))
            continue
        if name not in DIMENSIONS or not size.isdecimal() or name in sizes:
            hint = "" if name in DIMENSIONS else did_you_mean(name, DIMENSIONS)
            expected = f"expected NAME=SIZE, each name of {', '.join(DIMENSIONS)} at most once"
            problems.append(Problem(ProblemKind.MESH, repr(item), expected, advice=f"write it as fsdp=16,tp=8{hint}"))
        else:
            sizes[name] = int(size)
    if (ranks := math.prod(sizes.values())) > MOST_RANKS:
        detail = f"has {ranks:,} ranks, expected at most {MOST_RANKS:,}"
        problems.append(Problem(ProblemKind.MESH, text, detail, advice="give smaller sizes"))
    if problems:
        raise ShardingError("no such mesh", problems)
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}
