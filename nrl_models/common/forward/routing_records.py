"""Records of expert choices: their type, their checks, and the fraction of choices that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nrl_models.errors import UnknownArgumentError, listed, shown

RoutingRecord = dict[str, list[torch.Tensor]]
"""Indices of each `topk` in a module's last call, in order, by module name."""


def require_records(**records: Any) -> None:
    """Check that arguments are records: lists of integer tensors by module name.

    Raises:
        UnknownArgumentError: If one is not.
    """
    for argument, record in records.items():
        if not isinstance(record, Mapping):
            raise UnknownArgumentError(
                f"{argument}={shown(record)}: expected a record from record_routing or engine_routing"
            )
        for name, choices in record.items():
            if not isinstance(choices, Sequence) or not all(map(_is_integer, choices)):
                raise UnknownArgumentError(
                    f"{argument} has {shown(choices)} for {name}: expected a list of tensors of integers"
                )


def _is_integer(value: object) -> bool:
    """Return True for tensors of expert indices."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def require_existing(name: str, choices: torch.Tensor, candidates: int) -> None:
    """Check that recorded indices are below the number of values that a module chooses from.

    Raises:
        ValueError: If one is not.
    """
    if choices.numel() and (highest := int(choices.max())) >= candidates:
        raise ValueError(
            f"the record chooses index {highest} in {name}, which has {candidates} (0 to {candidates - 1}): replay a "
            "record of a model with the same number of experts"
        )


def engine_choices(routed: Sequence[Any]) -> list[torch.Tensor]:
    """Return an engine's choices of experts as tensors `(tokens, layers, experts_per_token)`, one per sequence.

    Raises:
        UnknownArgumentError: If there are none.
        ValueError: If shapes differ, apart from the number of tokens.
    """
    if routed is None or any(each is None for each in routed):
        raise UnknownArgumentError(
            "routed is or contains None: the engine returned no experts. For vLLM, start the engine with "
            "enable_return_routed_experts=True"
        )
    choices = [torch.as_tensor(each.astype("int64") if hasattr(each, "astype") else each).long() for each in routed]
    if not choices or {choice.ndim for choice in choices} != {3} or len({choice.shape[1:] for choice in choices}) > 1:
        raise ValueError(
            f"routed experts of shapes {[tuple(choice.shape) for choice in choices]}: expected (tokens, layers, "
            "experts per token) for each sequence, with the same layers and experts"
        )
    return choices


def flip_rate(first: Mapping[str, list[torch.Tensor]], second: Mapping[str, list[torch.Tensor]]) -> float:
    """Return the fraction of (token, router) pairs for which two records do not have the same set of choices.

    Pairs for which a record has no choice (-1) do not count. Modules that only `second` has are ignored.

    Raises:
        UnknownArgumentError: If `second` lacks a module of `first`, or an argument is not a record.
    """
    require_records(first=first, second=second)
    if missing := [name for name, choices in first.items() if choices and not second.get(name)]:
        raise UnknownArgumentError(f"second has no choices for {listed(missing)}: expected the modules of first")
    flipped, tokens = 0, 0
    for name, choices in first.items():
        if not choices:
            continue
        ours, theirs = choices[-1], second[name][-1].to(choices[-1].device)
        known = ((ours >= 0) & (theirs >= 0)).all(-1)
        different = (ours.sort(-1).values != theirs.sort(-1).values).any(-1) & known
        flipped += int(different.sum())
        tokens += int(known.sum())
    return flipped / tokens if tokens else 0.0
