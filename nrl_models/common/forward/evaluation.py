"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nrl_models.common.recording import forward_replaced


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
