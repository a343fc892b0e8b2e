"""Weights in Megatron-Core's layout: what each of its ranks holds, and a model from what they hold.

    from nrl_models.megatron.ranks import MegatronRank, Share, from_megatron, to_megatron

    rank = MegatronRank(tp=Share(0, 2), pp=Share(1, 4))
    for name, tensor in to_megatron(model, rank):
        ...

`MegatronRank` says which rank, and what its layers are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from nrl_models.common.views.view import View, apply_steps, place_of
from nrl_models.errors import Problem, ProblemKind, StateDictError
from nrl_models.megatron.layout import STATES, MegatronRank, Share

__all__ = ["MegatronRank", "Share", "from_megatron", "ranks_of", "to_megatron"]


def ranks_of(
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    transformer_engine: bool = True,
    grouped_experts: bool = True,
    vocabulary: int | None = None,
) -> list[MegatronRank]:
    """All ranks of so many shares.

    Args:
        tp, pp, ep: how many shares of each layer, of the layers, and of the experts there are.
        transformer_engine, grouped_experts, vocabulary: see `MegatronRank`.
    """
    shares = product(*([Share(index, of) for index in range(of)] for of in (tp, pp, ep)))
    return [
        MegatronRank(
            tp=of_layer,
            pp=stage,
            ep=experts,
            transformer_engine=transformer_engine,
            grouped_experts=grouped_experts,
            vocabulary=vocabulary,
        )
        for of_layer, stage, experts in shares
    ]


def to_megatron(
    model: Any,
    rank: MegatronRank = MegatronRank(),  # noqa: B008 - immutable
    max_bytes: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a rank of Megatron holds of a model, one after the other.

    Args:
        model: one of this library's, sharded or not; of a sharded model every rank has to iterate to the end.
        rank: which rank of Megatron's.
        max_bytes: as for `StateDictAdapter.iter_export`.

    Raises:
        StateDictError: the model has tensors that Megatron's GPT model has no place for, or that do not divide; all of
            them, before the first tensor.
    """
    yield from model.state_dict_adapter.iter_export(model, max_bytes, layout=rank)


def from_megatron(model: Any, held: Mapping[MegatronRank, Mapping[str, torch.Tensor]]) -> None:
    """Load into a model what Megatron's ranks hold.

    Args:
        model: one of this library's.
        held: by rank its tensors, of all ranks; what Megatron keeps beside tensors (`_extra_state`) may be there.

    Raises:
        StateDictError: tensors are missing or unexpected, of another shape, or differ where ranks hold the same; all of
            them, and nothing is loaded.
        ShardingError: tensors of a sharded model's state dict do not fit.
    """
    adapter = model.state_dict_adapter
    own = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in adapter.own.items()
        if name not in adapter.tied
    }
    problems: list[Problem] = []
    written: dict[View, MegatronRank] = {}
    for rank, tensors in held.items():
        table = adapter.layout(rank)
        where = _shown(rank)
        given = {name: value for name, value in tensors.items() if STATES not in name}
        problems += [
            Problem(ProblemKind.MISSING, name, "is not among its tensors", where) for name in table if name not in given
        ]
        for name, value in given.items():
            if name not in table:
                problems.append(Problem(ProblemKind.UNEXPECTED, name, "has no place in the model", where))
                continue
            target = table[name]
            if tuple(value.shape) != target.shape:
                detail = f"has shape {tuple(value.shape)}, expected {target.shape}"
                problems.append(Problem(ProblemKind.SHAPE, name, detail, where))
                continue
            for piece in target.pieces:
                part = apply_steps(value, piece.region)
                region = own[piece.view.parameter]
                if piece.view not in written:
                    piece.view.write(region, part)
                    written[piece.view] = rank
                elif not torch.equal(piece.view.of(region), part.to(region.dtype)):
                    detail = f"differs from what {_shown(written[piece.view])} holds of the same weight"
                    problems.append(Problem(ProblemKind.RANK, name, detail, where))
    if not problems:
        problems = list(_not_whole(adapter, written, own))
    if problems:
        raise StateDictError("what Megatron's ranks hold does not fit the model", problems)
    own |= {name: own[kept] for name, kept in adapter.tied.items() if name in adapter.own}
    model.load_state_dict(own)


def _not_whole(
    adapter: Any, written: Mapping[View, MegatronRank], own: Mapping[str, torch.Tensor]
) -> Iterator[Problem]:
    """Own tensors of which not all elements came: shares of one size are the same or have nothing in common."""
    came = dict.fromkeys(own, 0)
    for view in written:
        came[view.parameter] += torch.Size(place_of(tuple(own[view.parameter].shape), view.steps).shape).numel()
    for name, count in came.items():
        if count != own[name].numel():
            detail = f"{count} of its {own[name].numel()} values came: expected what all ranks hold"
            yield Problem(ProblemKind.PARTIAL, name, detail)


def _shown(rank: MegatronRank) -> str:
    shares = {"tp": rank.tp, "pp": rank.pp, "ep": rank.ep}
    return "rank " + ", ".join(f"{name} {share.index} of {share.of}" for name, share in shares.items())
