"""Check the tensors of a refit before an engine gets them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.errors import EngineError


def finite(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Check each tensor of a refit, then yield it.

    Raises:
        EngineError: If `tensors` are not pairs of name and complete tensor with values, a tensor has NaN or infinite
            values, a name is repeated, or there are no tensors.
    """
    if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        raise EngineError(
            f"a refit takes pairs of name and tensor, and got a {type(tensors).__name__}: pass "
            "model.state_dict_adapter.iter_export(model), or the items of a dict"
        )
    seen: set[str] = set()
    for pair in tensors:
        name, tensor = _checked(pair)
        if name in seen:
            raise EngineError(f"{name} was sent twice in one refit: send each tensor once")
        seen.add(name)
        if not is_finite(tensor):
            values = tensor.detach().float()
            raise EngineError(
                f"{name} has {int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite values of "
                f"{values.numel():,}: the engine does not get such weights. Restore the trainer from a checkpoint with "
                "finite weights, and skip updates whose gradient norm is not finite"
            )
        yield name, tensor
    if not seen:
        raise EngineError("a refit without tensors: the iterator is empty, or was exhausted before")


def _checked(pair: Any) -> NamedTensor:
    """Return a pair of name and tensor.

    Raises:
        EngineError: If it is something else, or the tensor has no values on this rank.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        shown = [type(part).__name__ for part in pair] if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise EngineError(f"a refit takes pairs of name and tensor, and got {shown}")
    name, tensor = pair
    problem = ""
    if not isinstance(tensor, torch.Tensor):
        problem = f"is a {type(tensor).__name__}: expected a torch.Tensor"
    elif isinstance(tensor, DTensor):
        problem = "is a DTensor: send complete tensors, as iter_export yields them"
    elif tensor.is_meta:
        problem = "is on meta and has no values: load the model's weights first"
    elif tensor.is_complex():
        problem = f"has the dtype {tensor.dtype}: engines have no complex weights"
    elif tensor.layout is not torch.strided:
        problem = f"has the layout {tensor.layout}: send tensor.to_dense()"
    if problem:
        raise EngineError(f"{name} {problem}")
    return name, tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite. One pass over the memory, without a temporary tensor.

    A single infinite value counts as finite: it is a disabled bound, such as `input_min` of Gemma 4.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    values = tensor.detach()
    if values.numel() == 1:
        return not bool(values.isnan())
    if values.element_size() < 2:  # float8, which has no reductions
        values = values.float()
    return all(bool(bound.isfinite()) for bound in torch.aminmax(values))  # NaN propagates to both


def keeps_range(sent: torch.dtype, held: torch.dtype) -> bool:
    """Return True if values that are finite in one dtype are finite in another.

    Dtypes of about the same range count as equal (float32 and bfloat16). Only floats of at least 16 bits are compared.
    """
    if not (sent.is_floating_point and held.is_floating_point) or min(sent.itemsize, held.itemsize) < 2:
        return True
    return torch.finfo(sent).max <= 1.01 * torch.finfo(held).max


def require_range(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that the values of a tensor stay finite in the engine's dtype: 70,000 is infinite in float16.

    A single infinite value passes, see `is_finite`. Tensors whose dtype rules that out are not read, see `keeps_range`.

    Raises:
        EngineError: If some values are out of range.
    """
    if keeps_range(tensor.dtype, dtype) or not tensor.numel():
        return
    limit = torch.finfo(dtype).max
    low, high = (float(bound) for bound in torch.aminmax(tensor.detach()))
    if limit < max(-low, high) and (tensor.numel() > 1 or math.isfinite(high)):
        raise EngineError(
            f"{name} has values from {low:.6g} to {high:.6g}, and the engine holds {dtype_name(dtype)} there, which "
            f"ends at {limit:.6g}: they would be infinite. Start the engine with dtype=torch.bfloat16 or torch.float32"
        )
