"""Which groups of a model run as one matmul, which do not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from nrl_models.common.modules import own_modules
from nrl_models.common.projections.combined import CombinedProjections, groups_of
from nrl_models.common.projections.obstacles import Obstacle


@dataclass(frozen=True, slots=True)
class GroupReport:
    """How a group computes at present.

    Args:
        name: of the group, with its owner's name in the model before it.
        linears: names of its linears, in row order.
        reason: why a call of the owner would not run one matmul for all of them; None if it would
            (`CombinedProjections` says when a step of decoding does not).
    """

    name: str
    linears: tuple[str, ...]
    reason: Obstacle | None

    @property
    def joined(self) -> bool:
        """Whether a call of the owner would run one matmul for all of them."""
        return self.reason is None


def report(model: nn.Module) -> list[GroupReport]:
    """How each group of `model` computes at present, in the order of its modules."""
    for module in model.modules():
        if isinstance(module, CombinedProjections) and module._join_when_run:
            module.join_projections()
    modules = dict(own_modules(model))
    return [
        GroupReport(f"{owner}.{name}" if owner else name, group.names, group.why_separate(modules[owner]))
        for owner, name, group in groups_of(model)
    ]


def join(model: nn.Module) -> None:
    """Put the weights of every group of `model` side by side in memory, where they are not and can be.

    Loading, `.to(...)`, copies and unpickling do so by themselves. It is for what they cannot see: weights that were
    replaced one by one, for example. `report` shows the outcome.
    """
    for module in model.modules():
        if isinstance(module, CombinedProjections):
            module.join_projections()


def neighbouring_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the parameters that are to be neighbours in memory, in the order of their rows: a tuple for each buffer.

    For code that fills a model's parameters, and can lay them out so from the start.
    """
    names = {id(module): name for name, module in own_modules(model)}
    result = []
    for _, _, group in groups_of(model):
        linears = group.linears.values()
        if not group.has_its_linears() or any(id(linear) not in names for linear in linears):
            continue
        result.append(tuple(f"{names[id(linear)]}.weight" for linear in linears))
        if all(linear.bias is not None for linear in linears):
            result.append(tuple(f"{names[id(linear)]}.bias" for linear in linears))
    return result
