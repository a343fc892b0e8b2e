"""Weights in Megatron-Core's layout: convert a model to the tensors of each rank, and load a model from them.

    from nrl_models.megatron.ranks import MegatronRank, Share, from_megatron, to_megatron

    rank = MegatronRank(tp=Share(0, 2), pp=Share(1, 4))
    for name, tensor in to_megatron(model, rank):
        ...

`MegatronRank` identifies a rank, and has the names of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from nrl_models.common.state_dict.ties import have_same_values
from nrl_models.common.views.view import View, apply_steps, region_of
from nrl_models.errors import Problem, ProblemKind, StateDictError
from nrl_models.megatron.layer_rules import STATES
from nrl_models.megatron.layout import MegatronRank, Share

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
    """Return all ranks for given numbers of shares.

    Args:
        tp, pp, ep: Numbers of shares of each layer, of the layers, and of the experts.
        transformer_engine, grouped_experts, vocabulary: See `MegatronRank`.
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
    """Yield the tensors of a model for a Megatron rank, one after another.

    Args:
        model: A model of this library, sharded or not. If it is sharded, every rank has to exhaust the iterator.
        rank: The Megatron rank.
        max_bytes: See `StateDictAdapter.iter_export`.

    Raises:
        StateDictError: Before the first tensor, if Megatron's GPT model has no equivalent of some tensors, or they
            cannot be divided. Lists all of them.
    """
    yield from model.state_dict_adapter.iter_export(model, max_bytes, layout=rank)


def from_megatron(model: Any, held: Mapping[MegatronRank, Mapping[str, torch.Tensor]]) -> None:
    """Load the tensors of Megatron's ranks into a model.

    Args:
        model: A model of this library.
        held: Tensors of each rank; all ranks are required. Other states of Megatron (`_extra_state`) are ignored.

    Raises:
        StateDictError: If tensors are missing, unexpected, of another shape, or differ between ranks that should hold
            the same. Lists all problems; nothing is loaded.
        ShardingError: If tensors do not fit a sharded model's state dict.
    """
    adapter = model.state_dict_adapter
    state_dict = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in adapter.specs.items()
        if name not in adapter.tied
    }
    problems: list[Problem] = []
    written: dict[View, MegatronRank] = {}
    for rank, tensors in held.items():
        table = adapter.layout(rank)
        where = _shown(rank)
        weights = {name: value for name, value in tensors.items() if STATES not in name}
        problems += [
            Problem(ProblemKind.MISSING, name, "is not among its tensors", where)
            for name in table
            if name not in weights
        ]
        for name, value in weights.items():
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
                region = state_dict[piece.view.parameter]
                if piece.view not in written:
                    piece.view.write(region, part)
                    written[piece.view] = rank
                elif not have_same_values(piece.view.of(region), part.to(region)):
                    detail = f"differs from the same weight on {_shown(written[piece.view])}"
                    problems.append(Problem(ProblemKind.RANK, name, detail, where))
    if not problems:
        problems = list(_not_whole(adapter, written, state_dict))
    if problems:
        raise StateDictError("the tensors of Megatron's ranks do not fit the model", problems)
    state_dict |= {name: state_dict[source] for name, source in adapter.tied.items() if name in adapter.specs}
    model.load_state_dict(state_dict)


def _not_whole(
    adapter: Any, written: Mapping[View, MegatronRank], state_dict: Mapping[str, torch.Tensor]
) -> Iterator[Problem]:
    """Yield tensors of the state dict with missing elements. Shares of equal size are either identical or disjoint."""
    came = dict.fromkeys(state_dict, 0)
    for view in written:
        came[view.parameter] += torch.Size(region_of(tuple(state_dict[view.parameter].shape), view.steps).shape).numel()
    for name, count in came.items():
        if count != state_dict[name].numel():
            detail = f"{count} of its {state_dict[name].numel()} values are present: expected the tensors of all ranks"
            yield Problem(ProblemKind.PARTIAL, name, detail)


def _shown(rank: MegatronRank) -> str:
    shares = {"tp": rank.tp, "pp": rank.pp, "ep": rank.ep}
    return "rank " + ", ".join(f"{name} {share.index} of {share.of}" for name, share in shares.items())
