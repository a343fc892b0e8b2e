"""Tensors of vLLM modules that did not get all of their new weights yet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from nrl_models.common.state_dict.buckets import YieldedTensor


def holes_in(module: torch.nn.Module, info: Any) -> dict[str, tuple[int, int]]:
    """Find tensors of a module that its new weights write only in part: number of missing elements, and the total.

    The weights are loaded into a tensor of NaN, as vLLM would load them. For dtypes without NaN, they are loaded into
    zeros and into ones. Padding does not count, because a loader overwrites or declares it (`weight_loader_numel`).
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    holes = {}
    for name in dict.fromkeys(name for name, _ in info.loaded_weights):
        tensor: Any = getattr(module, name)
        filled: list[torch.Tensor] = []
        for fill in (math.nan,) if tensor.is_floating_point() else (0, 1):
            target: Any = torch.full(tuple(tensor.shape), fill, dtype=tensor.dtype, device=info.restore_device)
            target.__class__, target.__dict__ = tensor.__class__, tensor.__dict__.copy()
            for loaded_name, bound in info.loaded_weights:
                if loaded_name == name:
                    again = type(bound)(bound.signature, {**bound.arguments, "param": target})
                    _get_original_loader(tensor)(*again.args, **again.kwargs)
            filled.append(target.data)
        unwritten = filled[0].isnan() if len(filled) == 1 else filled[0] != filled[1]
        size = getattr(tensor, "weight_loader_numel", tensor.numel())
        if (count := int(unwritten.sum()) - (tensor.numel() - size)) > 0:
            holes[name] = count, size
    return holes


def kept_tensors(model: torch.nn.Module) -> Iterator[YieldedTensor]:
    """Yield the tensors that vLLM keeps until their module has all of its weights, by the engine's names.

    Inference tensors are left out. They come from another process, in memory that does not change.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, module in model.named_modules():
        for tensor_name, bound in get_layerwise_info(module).loaded_weights:
            for key, value in bound.arguments.items():
                if key != "param" and isinstance(value, torch.Tensor) and not value.is_inference():
                    yield YieldedTensor(joined(name, tensor_name), value)


def joined(module: str, tensor_name: str) -> str:
    """Return the name in the model of a tensor of a module. The model's own name is empty."""
    return f"{module}.{tensor_name}" if module else tensor_name
