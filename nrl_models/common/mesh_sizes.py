"""The sizes of a mesh as they are written on a command line. Imports nothing heavy."""

from __future__ import annotations

import math

from nrl_models.errors import Problem, ProblemKind, ShardingError

DIMENSIONS = ("pp", "fsdp", "ep", "tp")
"""What a mesh's dimensions may be, in the order they have to stand.

`pp`: layers are divided into the stages of a pipeline. `fsdp`: parameters and batches are divided (fully sharded data
parallelism). `ep`: experts are divided. `tp`: the rows and columns of linears are divided. Ranks that differ only in
`pp`, `ep` and `tp` see the same batch.
"""

MOST_RANKS = 2**20
"""More than any cluster has."""


def parse_mesh(text: str) -> dict[str, int]:
    """`"fsdp=16,tp=8"` as sizes by dimension, in the order meshes have them.

    Raises:
        ShardingError: anything else.
    """
    sizes: dict[str, int] = {}
    problems = []
    for item in text.split(","):
        name, _, size = item.strip().partition("=")
        if name not in DIMENSIONS or not size.isdecimal() or int(size) < 1 or name in sizes:
            expected = f"expected name=size once for each of some of {', '.join(DIMENSIONS)}"
            problems.append(Problem(ProblemKind.MESH, repr(item), expected, advice="write it as fsdp=16,tp=8"))
        else:
            sizes[name] = int(size)
    if (ranks := math.prod(sizes.values())) > MOST_RANKS:
        detail = f"has {ranks:,} ranks, expected at most {MOST_RANKS:,}"
        problems.append(Problem(ProblemKind.MESH, text, detail, advice="give smaller sizes"))
    if problems:
        raise ShardingError("no such mesh", problems)
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}
