"""Report for each group of a model whether it is fused, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from nrl_models.common.modules import own_modules
from nrl_models.common.projections.combined import CombinedProjections, groups_of
from nrl_models.common.projections.obstacles import Obstacle


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Current state of a group.

    Args:
        name: Name of the group, with its parent module's name as prefix.
        linears: Names of its linears, in row order.
        reason: Reason why a call of the parent would not run one matmul for all of them; None if it would. Ignores the
            exception for decoding, see `CombinedProjections`.
    """

    name: str
    linears: tuple[str, ...]
    reason: Obstacle | None

    @property
    def joined(self) -> bool:
        """Whether a call of the parent would run one matmul for all linears."""
        return self.reason is None


def report(model: nn.Module) -> list[GroupReport]:
    """Return a report for each group of `model`, in the order of its modules, after trying to fuse unfused groups."""
    for module in model.modules():
        if isinstance(module, CombinedProjections) and module._join_when_run:
            module.join_projections()
    modules = dict(own_modules(model))
    return [
        GroupReport(f"{owner}.{name}" if owner else name, group.names, group.why_separate(modules[owner]))
        for owner, name, group in groups_of(model)
    ]


def join(model: nn.Module) -> None:
    """Move the weights of each group of `model` into one buffer, if they are not in one and nothing prevents it.

    Loading, `.to(...)`, copying and unpickling do this automatically. Call it after weights were replaced one by one,
    for example. `report` shows the result.
    """
    for module in model.modules():
        if isinstance(module, CombinedProjections):
            module.join_projections()


def neighboring_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of parameters that share a buffer: one tuple per buffer, in row order.

    For code that allocates a model's parameters, which can then make them contiguous from the start.
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
