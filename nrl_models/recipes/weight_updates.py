"""Parts of a training step that every loss shares: evaluation mode, precision, and the update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nrl_models.common.logs import get_logger
from nrl_models.common.recording import forward_replaced

logger = get_logger(__name__)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode while open: no dropout, no noise in routers.

    transformers' layers use activation checkpointing in training mode only. Layers that do so when this opens keep it,
    if the backward pass also runs while it is open.
    """
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        for module, training in modes:
            if training and isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                stack.enter_context(forward_replaced(module, partial(_checkpointed, module, module.forward)))
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _checkpointed(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        return layer._gradient_checkpointing_func(partial(forward, **kwargs), *args)
    return forward(*args, **kwargs)


def clipped_update(model: nn.Module, optimizer: torch.optim.Optimizer, most: float) -> dict[str, float]:
    """Clip the gradient and update the weights, unless the gradient is NaN or infinite.

    Args:
        model: with gradients; they are gone afterwards if the update was skipped.
        optimizer: of its parameters.
        most: the largest norm of the gradient.

    Returns:
        `gradient_norm` before clipping, and `skipped_updates`: 1 if the weights were left as they are.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), most))
    finite = norm < float("inf")  # False for NaN
    if finite:
        optimizer.step()
    else:
        optimizer.zero_grad()
        logger.warning(f"the gradient norm is {norm}: this update is skipped")
    return {"gradient_norm": norm, "skipped_updates": float(not finite)}


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """torch's autocast for bfloat16; nothing for fp32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
