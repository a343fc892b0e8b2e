"""Dtypes of a model's tensors: the requested dtype, or fp32 for tensors that transformers keeps in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.logs import get_logger
from nrl_models.common.upstream import dtype_plan
from nrl_models.common.upstream_conversions import build_glob_alternation
from nrl_models.common.upstream_torch import functorch_transforms_are_active, is_batched
from nrl_models.errors import did_you_mean

logger = get_logger(__name__)


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """Return the name of a dtype in configurations, such as `bfloat16`, or of a layout."""
    return str(dtype).removeprefix("torch.")


def unreadable(tensor: torch.Tensor) -> str:
    """Return the reason why the values of a tensor cannot be read element by element, or an empty string. O(1)."""
    if tensor.is_nested:
        return "is nested: pad it with torch.nested.to_padded_tensor(tensor, 0), and mask the padding"
    if tensor.layout is not torch.strided:
        return f"has the layout {dtype_name(tensor.layout)}: pass tensor.to_dense()"
    if tensor.is_quantized:
        return f"is of {tensor.dtype}: pass tensor.dequantize()"
    if tensor.is_meta:
        return "is on meta and has no values: pass a tensor on a CPU or an accelerator"
    if functorch_transforms_are_active() and is_batched(tensor):
        return "is batched by torch.vmap, which hides its values: call the function with the complete batch instead"
    return ""


SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
"""Dtypes by the names that trainers use."""


def named_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the dtype for a short name (`bf16`); other values are returned unchanged."""
    return SHORT_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype


def dtype_names(name: object) -> str:
    """Return the names of dtypes for a message about `name`, with the most similar one if there is any."""
    full = {dtype_name(dtype): short for short, dtype in SHORT_NAMES.items()}
    similar = did_you_mean(name.removeprefix("torch.") if isinstance(name, str) else name, [*full, *SHORT_NAMES])
    listed = ", ".join(f"{name} ({short})" for name, short in full.items())
    return f"{similar}: expected 'auto', {listed}, or their torch.dtype"


def warn_of_rounding(model: nn.Module) -> None:
    """Warn if weights that require grad are in 16 bits: small optimizer steps round away."""
    half = (torch.bfloat16, torch.float16)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    for dtype in dtypes.intersection(half):
        logger.warning(
            f"{type(model).__name__} is trained in {dtype_name(dtype)}, the dtype of its checkpoint. Small optimizer "
            "steps round away: AdamW with a learning rate of 1e-6 changes less than 1 % of the weights. Load it with "
            "dtype=torch.float32, or pass the dtype explicitly if this is intended."
        )


def support_float64(model: nn.Module) -> None:
    """Let a model with experts compute in fp64, if that is its dtype: torch's grouped matmul does not support it."""
    for part in model.modules() if getattr(model, "dtype", None) == torch.float64 else ():
        if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
            part.set_experts_implementation("eager")


def kept_dtypes(model: nn.Module, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Return a lookup of tensors that transformers keeps in another dtype when it loads `model` in `dtype`.

    Args:
        model: A `PreTrainedModel`. For other modules, nothing is kept.
        dtype: Requested dtype.

    Returns:
        A function from a tensor's name in transformers to the dtype it is kept in, or None.
    """
    plan = dtype_plan(model, dtype) if isinstance(model, PreTrainedModel) else {}
    if not plan:
        return lambda name: None
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def kept(name: str) -> torch.dtype | None:
        match = pattern.search(name)
        return plan[by_group[str(match.lastgroup)]] if match else None

    return kept


def same_kind(sent: torch.dtype, held: torch.dtype) -> bool:
    """Return True if a tensor of one dtype can represent weights in another.

    This holds between floating-point dtypes of at least 16 bits, and between integers. Narrower floats are quantized,
    so their values need scales. The exception is `float8_e8m0fnu` (powers of two), which is used for scales.
    """
    if sent == held:
        return True
    if sent.is_floating_point and held.is_floating_point:
        return held.itemsize > 1 and (sent.itemsize > 1 or sent == getattr(torch, "float8_e8m0fnu", None))
    return _is_integer(sent) and _is_integer(held)


def wrong_kind(name: str, sent: torch.dtype, held: torch.dtype) -> str:
    """Return the message for a tensor whose dtype does not match the engine's."""
    return (
        f"{name} was sent as {dtype_name(sent)}, and the engine holds {dtype_name(held)} there: send it as "
        f"{dtype_name(held)}" + (", or in another floating-point dtype" if held.is_floating_point else "")
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
