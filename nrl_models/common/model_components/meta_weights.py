"""Check that the weights of a model have values: weights on meta have only shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nrl_models.common.modules import class_name, own_parameters
from nrl_models.errors import DeviceError, listed


def require_head_values(model: Any) -> None:
    """Check that the output embedding of a model is not on meta. O(1), for each call.

    Raises:
        DeviceError: If it is, and accelerate does not load it while the model runs.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_meta:
        require_values(model)


def require_values(model: nn.Module) -> None:
    """Check that no weight of a model is on meta. Visits all weights.

    Raises:
        DeviceError: If one is, and accelerate does not load it while the model runs.
    """
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return
    if names := [name for name, parameter in own_parameters(model) if parameter.is_meta]:
        raise DeviceError(
            f"{class_name(model)} has {len(names)} weights on meta, which have no values: {listed(names)}. Load a "
            "checkpoint with from_pretrained; from_config(device='meta') gives shapes only"
        )
