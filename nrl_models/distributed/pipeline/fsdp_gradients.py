"""FSDP over the microbatches of a step: gradients are accumulated whole, and divided once, after the last backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gradients_divided_once(model: nn.Module, reshard_after_forward: bool, keep_gathered: bool) -> Iterator[None]:
    """Have FSDP average gradients over its ranks when all microbatches are done. Nothing where it was not applied.

    Args:
        model: the outermost module.
        reshard_after_forward: what a unit does afterwards as before, see `ParallelPlan`.
        keep_gathered: whether a unit keeps its parameters gathered until then. A backward for inputs that is followed
            by another for weights needs that: it looks for the parameters that the forward has used.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    # Not at the top: every load of a model would import it, a tenth of its start.
    from torch.distributed.pipelining import PipelineStage

    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    if keep_gathered:
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    yield
    # torch's own end of a step, for the outermost module in place of a stage's.
    PipelineStage.perform_reduce_grad(cast(Any, SimpleNamespace(submod=model)), 1)
    if keep_gathered:
        model.set_reshard_after_forward(reshard_after_forward)


def free_gathered(model: nn.Module) -> None:
    """Free what FSDP has gathered, as a forward without a backward leaves it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
