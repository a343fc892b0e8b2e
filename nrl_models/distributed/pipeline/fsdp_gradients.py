"""FSDP with several microbatches: accumulate unsharded gradients, and reduce them once after the last backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gradients_divided_once(model: nn.Module, reshard_after_forward: bool, keep_gathered: bool) -> Iterator[None]:
    """Make FSDP average gradients over its ranks only after all microbatches. No effect without FSDP.

    Args:
        model: The outermost module.
        reshard_after_forward: Value to restore for each unit, see `ParallelPlan`.
        keep_gathered: Whether units keep their parameters gathered until then. Required if the backward for inputs and
            the backward for weights are separate, because the second uses the parameters of the forward.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    root: Any = model
    is_manual = hasattr(model, "finalize_backward")  # from torch 2.15 on
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    if is_manual:
        root.set_manual_backward_finalization(True)
    if keep_gathered:
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    yield
    # As torch's pipeline stages end a step, but for the outermost module.
    if is_manual:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        root.finalize_backward()
        root.set_manual_backward_finalization(False)
        model.set_is_last_backward(True)
    else:
        # Not at the top: every load of a model would import it, a tenth of its start.
        from torch.distributed.pipelining import PipelineStage

        PipelineStage.perform_reduce_grad(cast(Any, SimpleNamespace(submod=model)), 1)
    if keep_gathered:
        model.set_reshard_after_forward(reshard_after_forward)


def free_gathered(model: nn.Module) -> None:
    """Free parameters that FSDP has gathered, as after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
