"""The mesh a model is sharded over, and agreement between its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nrl_models.common.mesh_sizes import DIMENSIONS
from nrl_models.errors import NRLModelsError, Problem, ProblemKind, ShardingError, UnknownArgumentError, listed

SEED_ADVICE = (
    "seed all ranks alike, torch.manual_seed(0), before adding adapters or heads: their initial values are random"
)
"""Advice for parameters with other values on each rank."""

Ranks = DeviceMesh | dist.ProcessGroup | None
"""Ranks that act together: all ranks of a mesh or process group. None means only this rank."""


def check_mesh(mesh: DeviceMesh) -> None:
    """Check that the dimensions of a mesh are from `DIMENSIONS`.

    Raises:
        ShardingError: If a dimension has no name, an unknown name, or is in the wrong order.
        UnknownArgumentError: If it is not a mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UnknownArgumentError(
            f"mesh is a {type(mesh).__name__}, expected a torch.distributed.device_mesh.DeviceMesh: call "
            "parallelize(model, mesh, plan), with mesh = init_device_mesh(device, sizes, mesh_dim_names=names)"
        )
    names = mesh.mesh_dim_names or ()
    expected = f"expected some of {', '.join(DIMENSIONS)}, in this order"
    details = {repr(name): "is not a dimension of a model" for name in names if name not in DIMENSIONS}
    if not names:
        details = {str(tuple(mesh.shape)): "has dimensions without names"}
    elif not details and list(names) != [name for name in DIMENSIONS if name in names]:
        details = {", ".join(names): "are in the wrong order"}
    if details:
        problems = [Problem(ProblemKind.MESH, subject, f"{detail}; {expected}") for subject, detail in details.items()]
        advice = ['name the dimensions: init_device_mesh(device, (2, 4), mesh_dim_names=("fsdp", "tp"))']
        raise ShardingError("the mesh does not fit a model", problems, advice)


def size_of(mesh: DeviceMesh, name: str) -> int:
    """Return the size of a dimension; 1 if the mesh lacks it."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def rank_in(mesh: DeviceMesh, name: str) -> int:
    """Return this rank's index in a dimension; 0 if the mesh lacks it."""
    return mesh.get_local_rank(name) if name in (mesh.mesh_dim_names or ()) else 0


def rank_number(mesh: DeviceMesh) -> int:
    """Return this rank's index in the mesh, in the order of `gather_over`."""
    index = 0
    for dim in range(mesh.ndim):
        index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index


def is_first(ranks: Ranks) -> bool:
    """Return True on the first of the ranks, which writes files."""
    if ranks is None:
        return True
    return (rank_number(ranks) if isinstance(ranks, DeviceMesh) else dist.get_rank(ranks)) == 0


def has_stages(mesh: DeviceMesh) -> bool:
    """Return True if the ranks of a mesh hold pipeline stages."""
    return "pp" in (mesh.mesh_dim_names or ())


def describe(mesh: DeviceMesh) -> str:
    """Describe a mesh as text: `fsdp=2, tp=4`."""
    return ", ".join(f"{name}={mesh.size(dim)}" for dim, name in enumerate(mesh.mesh_dim_names or ()))


def gather_over(ranks: Ranks, value: Any) -> list[Any]:
    """Return `value` of every rank, in the order of the mesh or group, on every rank."""
    if ranks is None:
        return [value]
    if not isinstance(ranks, DeviceMesh):
        return _gathered(ranks, value)
    values = [value]
    for dim in reversed(range(ranks.ndim)):
        if ranks.size(dim) > 1:
            values = [item for part in _gathered(ranks.get_group(dim), values) for item in part]
    return values


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def agree(
    ranks: Ranks,
    action: str,
    facts: dict[str, Any],
    error: Exception | None = None,
    left: str = "nothing was changed on the others",
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise on every rank if any rank has an error, or if facts differ between ranks.

    Prevents ranks from waiting for another rank that has stopped.

    Args:
        ranks: The ranks, which all have to call this.
        action: The next action, for the message.
        facts: Values that must be equal on all ranks, compared by `repr`. For dictionaries, the message has the first
            keys that differ.
        error: Error of this rank.
        left: State of the other ranks after the error, for the message.
        remedies: Advice for facts that differ, by name.

    Raises:
        ShardingError: If another rank has an error, or facts differ. The rank with the error raises the error itself.
    """
    if ranks is None:
        if error is not None:
            raise error
        return
    reprs = {key: _short(repr(value)) for key, value in facts.items()}
    message = None if error is None else f"{type(error).__name__}: {error}"
    try:
        with reporting_dead_ranks(action):
            reports = gather_over(ranks, (dist.get_rank(), message, reprs))
    except ShardingError as dead:
        raise (dead if error is None else error) from dead
    if error is not None:
        raise error
    different = {f"rank {rank}": message for rank, message, _ in reports if message is not None}
    advice = [f"see the output of the rank named; {left}"]
    if not different:
        (first, _, expected), *others = reports
        keys = [key for key, value in expected.items() if any(theirs.get(key) != value for _, _, theirs in others)]
        global_ranks = [rank for rank, _, _ in reports]
        by_item = dict(zip(global_ranks, _items_of(ranks, facts, keys), strict=True)) if keys else {}
        for key in keys:
            for rank, _, theirs in others:
                if theirs.get(key) != expected[key]:
                    items = _differing(by_item[first][key], by_item[rank][key])
                    detail = f"is {theirs.get(key)}, but rank {first} has {expected[key]}"
                    different[f"{key} of rank {rank}"] = (
                        f"differ from those of rank {first} in {listed(items, 3)}" if items else detail
                    )
        advice = [remedies[key] for key in keys if key in remedies]
        advice.append("give every rank the same checkpoint, configuration, mesh, plan, progress and versions")
    if different:
        problems = [Problem(ProblemKind.RANK, subject, detail) for subject, detail in different.items()]
        raise ShardingError(f"cannot {action}: ranks failed or disagree", problems, advice)


def _items_of(ranks: Ranks, facts: Mapping[str, Any], keys: Sequence[str]) -> list[dict[str, dict[Any, str]]]:
    """Return the items of every rank's facts that are dictionaries, by fact, as short texts."""
    items = {
        key: {name: _short(repr(value)) for name, value in fact.items()} if isinstance(fact, Mapping) else {}
        for key, fact in ((key, facts.get(key)) for key in keys)
    }
    return gather_over(ranks, items)


def _differing(first: Mapping[Any, str], second: Mapping[Any, str]) -> list[str]:
    return [str(name) for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]


@contextmanager
def agreed(ranks: Ranks, action: str, remedies: Mapping[str, str] = MappingProxyType({})) -> Iterator[dict[str, Any]]:
    """Raise on every rank if the body fails on any rank, see `agree`. No effect without other ranks.

    Yields:
        A dictionary for facts that must be equal on all ranks.
    """
    facts: dict[str, Any] = {}
    if ranks is None:
        yield facts
        return
    error = None
    try:
        yield facts
    except Exception as caught:
        error = caught
    agree(ranks, action, facts, error, remedies=remedies)


@contextmanager
def reporting_dead_ranks(action: str) -> Iterator[None]:
    """Explain a failed collective in the body: a rank died, or is slower than the process group's timeout.

    Raises:
        ShardingError: If the collective failed.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, (NRLModelsError, torch.OutOfMemoryError)):  # of this rank
            raise
        detail = f"is gone, or did not come in time: {error}"
        problem = Problem(ProblemKind.RANK, "a rank that this one waited for", detail)
        advice = ["see the output of the other ranks: one of them ended first"]
        raise ShardingError(f"cannot {action}", [problem], advice) from error


def _short(text: str) -> str:
    """Return `text` if it is short, or else its beginning and a digest of the complete text."""
    if len(text) <= 120:
        return text
    return f"{text[:60]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
