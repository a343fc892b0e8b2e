"""The matmul of a group: one product in place of several, with gradients as separate products would have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F


def joined_linear(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    weight_rows: torch.Tensor,
    bias_rows: torch.Tensor | None,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """What `F.linear(input, weight, bias)` gives for each of several weights that are neighbours in memory.

    Shape suffixes: `I` input features, `O` output features of a weight, `C` the sum of the `O`.

    Args:
        input: `(..., I)`.
        weights: each `(O, I)`; they get the gradients. All of them require a gradient, or none, while gradients are
            enabled.
        biases: each `(O,)`, likewise; empty without biases.
        weight_rows: `(C, I)`, the memory that the weights are.
        bias_rows: `(C,)`, the memory that the biases are, or None.
        lengths: the `O` of each weight.

    Returns:
        For each weight `(..., O)`: slices of one product, which may be changed in place.
    """
    if torch.is_grad_enabled() and (
        input.requires_grad or weights[0].requires_grad or (biases and biases[0].requires_grad)
    ):
        device = input.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if torch.float64 in (input.dtype, weight_rows.dtype):  # autocast leaves these alone
            cast = None
        if cast is not None:
            input = input.to(cast)
        return _JoinedLinear.apply(input, weight_rows, bias_rows, lengths, cast, *weights, *biases)
    # `unsafe_split` is `split` whose slices may be changed in place (OLMo clamps its queries so).
    return torch.unsafe_split_with_sizes(F.linear(input, weight_rows, bias_rows), lengths, -1)


class _JoinedLinear(torch.autograd.Function):
    """`joined_linear` with gradients.

    It saves what the separate linears would save, so that a weight that is changed before the backward pass is found
    as torch finds it, and whatever packs saved tensors (checkpointing, offloading) sees the same. A part whose output
    nobody used gets no gradient, in place of one that is zero.
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
        weights = parameters[: len(lengths)]
        ctx.set_materialize_grads(False)
        ctx.lengths, ctx.has_bias, ctx.dtype = lengths, bias_rows is not None, weights[0].dtype
        ctx.wants_input, ctx.wants_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        ctx.wants_biases = ctx.has_bias and ctx.needs_input_grad[-1]
        if cast is not None:
            weight_rows = weight_rows.to(cast)
            bias_rows = None if bias_rows is None else bias_rows.to(cast)
            ctx.cast_weights = weights  # for a second derivative only: what is saved is the cast copy, as in torch
            ctx.versions = [weight._version for weight in weights]
        saved = weights if cast is None else (weight_rows,)
        ctx.is_cast, ctx.rows = cast is not None, weight_rows if cast is None and ctx.wants_input else None
        ctx.save_for_backward(input if ctx.wants_weights else None, *(saved if ctx.wants_input else ()))
        return torch.unsafe_split_with_sizes(F.linear(input, weight_rows, bias_rows), lengths, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        input, *weights = ctx.saved_tensors
        if torch.is_grad_enabled() or any(gradient is None for gradient in gradients):
            found = _separately(ctx, input, _separate_weights(ctx, weights), gradients)
        else:
            found = _jointly(ctx, input, weights, torch.cat(gradients, -1))  # type: ignore[arg-type]
        input_gradient, weight_gradients, bias_gradients = found
        return (input_gradient, None, None, None, None, *weight_gradients, *bias_gradients)


Gradients = tuple[torch.Tensor | None, Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]
"""Of the input, of each weight, of each bias."""


def _jointly(ctx: Any, input: torch.Tensor | None, weights: list[torch.Tensor], gradient: torch.Tensor) -> Gradients:
    """All gradients of one product from that of its output `(..., C)`; each part's is its rows, without a copy."""
    input_gradient = None
    weight_gradients: Sequence[torch.Tensor | None] = [None] * len(ctx.lengths)
    bias_gradients: Sequence[torch.Tensor | None] = [None] * len(ctx.lengths) if ctx.has_bias else []
    flat = gradient.reshape(-1, gradient.shape[-1])
    if ctx.wants_input:
        input_gradient = gradient @ (weights[0] if ctx.is_cast else _rows_of(weights, ctx.rows))
    if ctx.wants_weights:
        assert input is not None
        rows = (flat.t() @ input.reshape(-1, input.shape[-1])).to(ctx.dtype)
        weight_gradients = torch.unsafe_split_with_sizes(rows, ctx.lengths, 0)
    if ctx.wants_biases:
        bias_gradients = torch.unsafe_split_with_sizes(flat.sum(0).to(ctx.dtype), ctx.lengths, 0)
    return input_gradient, weight_gradients, bias_gradients


def _separately(
    ctx: Any, input: torch.Tensor | None, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> Gradients:
    """The gradients part by part: of the parts that were used, and so that they can be differentiated again."""
    count = len(ctx.lengths)
    input_gradient = None
    weight_gradients: list[torch.Tensor | None] = [None] * count
    bias_gradients: list[torch.Tensor | None] = [None] * count if ctx.has_bias else []
    for number, gradient in enumerate(gradients):
        if gradient is None:
            continue
        flat = gradient.reshape(-1, gradient.shape[-1])
        if ctx.wants_input:
            share = gradient @ weights[number]
            input_gradient = share if input_gradient is None else input_gradient + share
        if ctx.wants_weights:
            assert input is not None
            weight_gradients[number] = (flat.t() @ input.reshape(-1, input.shape[-1])).to(ctx.dtype)
        if ctx.wants_biases:
            bias_gradients[number] = flat.sum(0).to(ctx.dtype)
    return input_gradient, weight_gradients, bias_gradients


def _separate_weights(ctx: Any, weights: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Each part's weight, from what was saved."""
    if not ctx.is_cast or not ctx.wants_input:
        return weights
    if not torch.is_grad_enabled():
        return weights[0].split(ctx.lengths)
    if any(weight._version != version for weight, version in zip(ctx.cast_weights, ctx.versions, strict=True)):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a weight "
            "of a group of projections changed between the forward pass and a backward pass with create_graph=True"
        )
    return [weight.to(weights[0].dtype) for weight in ctx.cast_weights]


def _rows_of(weights: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The memory that `weights` are, or a copy where what was saved came back elsewhere (offloading, `.data =`)."""
    pointer = rows.data_ptr()
    for weight in weights:
        if weight.data_ptr() != pointer or weight.dtype != rows.dtype or not weight.is_contiguous():
            return torch.cat(weights)
        pointer += weight.nbytes
    return rows
