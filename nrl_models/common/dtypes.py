"""Dtypes of a model's tensors: the one it is loaded in, but fp32 where transformers keeps fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.upstream import build_glob_alternation, dtype_plan


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as configurations write it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
"""What trainers call dtypes."""


def named_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its short name (`bf16`); everything else is returned as it is."""
    return SHORT_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype


def kept_dtypes(model: nn.Module, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """The dtypes of tensors that transformers keeps in another dtype when it loads `model` in `dtype`.

    Args:
        model: a `PreTrainedModel`; of any other module nothing is kept.
        dtype: of the rest.

    Returns:
        For a tensor's name in transformers the dtype it is kept in, None if it is not.
    """
    plan = dtype_plan(model, dtype) if isinstance(model, PreTrainedModel) else {}
    if not plan:
        return lambda name: None
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def kept(name: str) -> torch.dtype | None:
        found = pattern.search(name)
        return plan[by_group[str(found.lastgroup)]] if found else None

    return kept


def same_kind(sent: torch.dtype, held: torch.dtype) -> bool:
    """Return True if a tensor of one dtype can stand for the same weights in another.

    Floating-point dtypes of at least 16 bits can, and so can integers. Narrower ones are quantized: their values mean
    nothing without a scale, but for powers of two (`float8_e8m0fnu`), which are scales.
    """
    if sent == held:
        return True
    if sent.is_floating_point and held.is_floating_point:
        return held.itemsize > 1 and (sent.itemsize > 1 or sent == getattr(torch, "float8_e8m0fnu", None))
    return _is_integer(sent) and _is_integer(held)


def wrong_kind(name: str, sent: torch.dtype, held: torch.dtype) -> str:
    """The message about a tensor whose dtype is not of the same kind as the engine's."""
    return (
        f"{name} was sent as {dtype_name(sent)}, and the engine holds {dtype_name(held)} there: send it as "
        f"{dtype_name(held)}" + (", or in another floating-point dtype" if held.is_floating_point else "")
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
