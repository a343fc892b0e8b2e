"""Which groups of a model run as one matmul, which do not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from nrl_models.common.projections.combined import CombinedProjections, groups_of


@dataclass(frozen=True, slots=True)
class GroupReport:
    """How a group computes at present.

    Args:
        name: of the group, with its owner's name in the model before it.
        parts: names of its linears, in row order.
        joined: whether a call of the owner would run one matmul for all of them (`CombinedProjections` says when a step
            of decoding does not).
        reason: why not; empty if it would.
    """

    name: str
    parts: tuple[str, ...]
    joined: bool
    reason: str


def report(model: nn.Module) -> list[GroupReport]:
    """How each group of `model` computes at present, in the order of its modules."""
    found = []
    for module in model.modules():
        if isinstance(module, CombinedProjections) and module._join_when_run:
            module.join_projections()
    for owner, name, group in groups_of(model):
        reason = group.why_separate()
        found.append(GroupReport(f"{owner}.{name}" if owner else name, group.names, not reason, reason))
    return found


def join(model: nn.Module) -> None:
    """Lay the weights of every group of `model` side by side in memory, where they are not and can be.

    Loading, `.to(...)`, copies and unpickling do so by themselves. It is for what they cannot see: weights that were
    replaced one by one, say. `report` shows the outcome.
    """
    for module in model.modules():
        if isinstance(module, CombinedProjections):
            module.join_projections()


def neighbouring_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the parameters that are to be neighbours in memory, in the order of their rows: a tuple for each buffer.

    For whoever fills a model's parameters, and can lay them so from the first.
    """
    names = {id(module): name for name, module in model.named_modules()}
    result = []
    for _, _, group in groups_of(model):
        parts = group.parts.values()
        if not group.has_its_linears() or any(id(part) not in names for part in parts):
            continue
        result.append(tuple(f"{names[id(part)]}.weight" for part in parts))
        if all(part.bias is not None for part in parts):
            result.append(tuple(f"{names[id(part)]}.bias" for part in parts))
    return result
