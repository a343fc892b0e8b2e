"""The update of the weights, which every loss shares."""

from __future__ import annotations

import math

import torch
from torch import nn

from nrl_models.common.logs import get_logger

logger = get_logger(__name__)


def clipped_update(model: nn.Module, optimizer: torch.optim.Optimizer, most: float) -> dict[str, float]:
    """Clip the gradient and update the weights, unless the gradient is NaN or infinite.

    Args:
        model: Model with gradients. They are set to None if the update is skipped.
        optimizer: Optimizer of the model's parameters.
        most: Maximum gradient norm; 0 for no clipping.

    Returns:
        `gradient_norm` before clipping, and `skipped_updates`: 1 if the update was skipped.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), most or math.inf))
    finite = norm < math.inf  # False for NaN
    if finite:
        optimizer.step()
    else:
        optimizer.zero_grad()
        logger.warning(f"the gradient norm is {norm}: this update is skipped")
    return {"gradient_norm": norm, "skipped_updates": float(not finite)}
