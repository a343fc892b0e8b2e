"""Training and evaluation mode, and precision, changed for the duration of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nrl_models.common.recording import forward_replaced


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return torch's autocast, or a context manager without effect for None and fp32."""
    return nullcontext() if dtype in (None, torch.float32) else torch.autocast(device.type, dtype)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module at the end: frozen parts of a model that is trained may be in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode while open: no dropout, no noise in routers.

    transformers' layers use activation checkpointing in training mode only. Layers that do so when this opens keep it,
    if the backward pass also runs while it is open.
    """
    with modes_kept(model), ExitStack() as stack:
        for module in model.modules():
            is_layer = isinstance(module, GradientCheckpointingLayer)
            if is_layer and module.training and module.gradient_checkpointing:
                stack.enter_context(forward_replaced(module, partial(_checkpointed, module, module.forward)))
        model.eval()
        yield


def _checkpointed(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        return layer._gradient_checkpointing_func(partial(forward, **kwargs), *args)
    return forward(*args, **kwargs)


def modules_around(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """Return the modules that contain `module`, outermost first, and `module` itself."""
    name = next(name for name, part in model.named_modules() if part is module)
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
