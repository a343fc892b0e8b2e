"""The fused matmul of a group: one matmul instead of several, with the same gradients as separate matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from nrl_models.common.projections.memory import Buffer, version_of


class JoinedWeights(NamedTuple):
    """Arguments of `joined_linear` other than the input."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    weight_rows: torch.Tensor
    bias_rows: torch.Tensor | None
    lengths: tuple[int, ...]

    @staticmethod
    def of(linears: Sequence[nn.Module | None]) -> JoinedWeights | None:
        """Return the parameters of `linears` and their buffers; None if some are in no buffer."""
        parameters = [{} if linear is None else linear._parameters for linear in linears]
        weights, biases = [own.get("weight") for own in parameters], [own.get("bias") for own in parameters]
        weight_buffer = Buffer.of(weights)
        if weight_buffer is None:
            return None
        if all(bias is None for bias in biases):
            return JoinedWeights(weights, [], weight_buffer.rows, None, weight_buffer.lengths)  # type: ignore[arg-type]
        bias_buffer = Buffer.of(biases)
        if bias_buffer is None:
            return None
        return JoinedWeights(weights, biases, weight_buffer.rows, bias_buffer.rows, weight_buffer.lengths)  # type: ignore[arg-type]

    def learn_alike(self) -> bool:
        """Return True if all weights agree on `requires_grad`, and all biases do too."""
        if not torch.is_grad_enabled():
            return True
        return all(len({tensor.requires_grad for tensor in tensors}) < 2 for tensors in (self.weights, self.biases))


def joined_linear(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    weight_rows: torch.Tensor,
    bias_rows: torch.Tensor | None,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Compute `F.linear(input, weight, bias)` for several contiguous weights with one matmul.

    Shapes: I input features, O output features of a weight, C the sum of all O.

    Args:
        input: `(..., I)`.
        weights: `(O, I)` each. They receive the gradients. If gradients are enabled, either all or none require grad.
        biases: `(O,)` each, with the same condition. Empty without biases.
        weight_rows: `(C, I)`, the buffer of the weights.
        bias_rows: `(C,)`, the buffer of the biases, or None.
        lengths: O of each weight.

    Returns:
        One tensor `(..., O)` per weight: slices of the fused output. They may be modified in place.
    """
    if torch.is_grad_enabled() and (
        input.requires_grad or weights[0].requires_grad or (biases and biases[0].requires_grad)
    ):
        device = input.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if torch.float64 in (input.dtype, weight_rows.dtype):  # autocast does not change these
            cast = None
        # Save a flat, separate view of the input, as torch's linear does.
        *leading, features = input.shape
        flat = (input if cast is None else input.to(cast)).reshape(prod(leading), features)
        outputs = _JoinedLinear.apply(flat, weight_rows, bias_rows, lengths, cast, *weights, *biases)
        return tuple(output.view(*leading, length) for output, length in zip(outputs, lengths, strict=True))
    # `unsafe_split` is a `split` whose slices may be modified in place (OLMo clamps its queries this way).
    return torch.unsafe_split_with_sizes(F.linear(input, weight_rows, bias_rows), lengths, -1)


class _JoinedLinear(torch.autograd.Function):
    """`joined_linear` of a flat input `(N, I)`, with gradients.

    Modifying a weight in place before the backward raises, as in torch, if the output of its linear is used. A linear
    whose output is unused gets no gradient, rather than zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight_rows: torch.Tensor,
        bias_rows: torch.Tensor | None,
        lengths: Sequence[int],
        cast: torch.dtype | None,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lengths, ctx.is_cast = lengths, cast is not None
        # Keep the parameters for second derivatives, and to check whether they changed.
        ctx.weights = parameters[: len(lengths)]
        ctx.versions = [version_of(weight) for weight in ctx.weights]
        ctx.dtype = ctx.weights[0].dtype
        ctx.wants_input, ctx.wants_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        ctx.has_bias = bias_rows is not None
        ctx.wants_biases = ctx.has_bias and ctx.needs_input_grad[-1]
        if cast is not None:
            weight_rows = weight_rows.to(cast)
            bias_rows = None if bias_rows is None else bias_rows.to(cast)
        ctx.save_for_backward(input if ctx.wants_weights else None, weight_rows if ctx.wants_input else None)
        return torch.unsafe_split_with_sizes(F.linear(input, weight_rows, bias_rows), list(lengths), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        input, rows = ctx.saved_tensors
        differentiates = torch.is_grad_enabled()
        if ctx.wants_input and (differentiates or not ctx.is_cast):  # otherwise a cast copy was used, and saved
            _check_versions(ctx, [gradient is not None for gradient in gradients])
        if differentiates or any(gradient is None for gradient in gradients):
            weights = [None] * len(ctx.lengths)
            if ctx.wants_input and differentiates:
                weights = [weight.to(rows.dtype) for weight in ctx.weights]
            elif ctx.wants_input:
                weights = rows.split(list(ctx.lengths))
            found = _separately(ctx, input, weights, gradients)
        else:
            found = _jointly(ctx, input, rows, torch.cat(gradients, -1))  # type: ignore[arg-type]
        input_gradient, weight_gradients, bias_gradients = found
        return (input_gradient, None, None, None, None, *weight_gradients, *bias_gradients)


Gradients = tuple[torch.Tensor | None, Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]
"""Gradients of the input, of each weight, of each bias."""


def _jointly(ctx: Any, input: torch.Tensor | None, rows: torch.Tensor | None, gradient: torch.Tensor) -> Gradients:
    """Compute all gradients from the gradient of the fused output, `(N, C)`. Gradients of linears are views of rows."""
    lengths = list(ctx.lengths)
    input_gradient = gradient @ rows if rows is not None else None
    weight_gradients: Sequence[torch.Tensor | None] = [None] * len(lengths)
    bias_gradients: Sequence[torch.Tensor | None] = [None] * len(lengths) if ctx.has_bias else []
    if ctx.wants_weights:
        assert input is not None
        weight_gradients = _cut((gradient.t() @ input).to(ctx.dtype), lengths)
    if ctx.wants_biases:
        bias_gradients = _cut(gradient.sum(0).to(ctx.dtype), lengths)
    return input_gradient, weight_gradients, bias_gradients


def _cut(gradient: torch.Tensor, lengths: list[int]) -> Sequence[torch.Tensor]:
    """Split a gradient into the linears' rows, without a copy. Each slice may be modified in place."""
    try:
        return torch.unsafe_split_with_sizes(gradient, lengths, 0)
    except RuntimeError:  # a batched gradient (`is_grads_batched=True`) is not supported
        return gradient.split(lengths)


def _separately(
    ctx: Any,
    input: torch.Tensor | None,
    weights: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
) -> Gradients:
    """Compute the gradients one by one, only for linears that were used. Supports second derivatives."""
    count = len(ctx.lengths)
    input_gradient = None
    weight_gradients: list[torch.Tensor | None] = [None] * count
    bias_gradients: list[torch.Tensor | None] = [None] * count if ctx.has_bias else []
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        if gradient is None:
            continue
        if weight is not None:
            share = gradient @ weight
            input_gradient = share if input_gradient is None else input_gradient + share
        if ctx.wants_weights:
            assert input is not None
            weight_gradients[number] = (gradient.t() @ input).to(ctx.dtype)
        if ctx.wants_biases:
            bias_gradients[number] = gradient.sum(0).to(ctx.dtype)
    return input_gradient, weight_gradients, bias_gradients


def _check_versions(ctx: Any, used: Sequence[bool]) -> None:
    """Raise if a weight that a gradient needs has changed since the forward.

    Raises:
        RuntimeError: The same as torch's.
    """
    for weight, version, is_used in zip(ctx.weights, ctx.versions, used, strict=True):
        if is_used and version is not None and weight._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight of shape {tuple(weight.shape)}, of a group of projections, is at version {weight._version}; "
                f"expected version {version} instead."
            )
