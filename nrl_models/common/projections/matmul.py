"""The fused matmul of a group: one matmul instead of several, with the same gradients as separate matmuls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        weights: list[Any] = []
        biases: list[Any] = []
        for linear in linears:
            if linear is None:
                return None
            weights.append(linear._parameters.get("weight"))
            biases.append(linear._parameters.get("bias"))
        if (buffer := Buffer.of(weights)) is None:
            return None
        if biases[0] is None and biases.count(None) == len(biases):
            return JoinedWeights(weights, [], buffer.rows, None, buffer.lengths)
        if (bias_buffer := Buffer.of(biases)) is None:
            return None
        return JoinedWeights(weights, biases, buffer.rows, bias_buffer.rows, buffer.lengths)

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
        lengths, differentiates = list(ctx.lengths), torch.is_grad_enabled()
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        if ctx.wants_input and (differentiates or not ctx.is_cast):  # otherwise a cast copy was used, and saved
            _check_versions(ctx, used)
        # Linears whose gradients are computed together, the gradient of their outputs `(N, O)`, and their weights.
        parts: list[tuple[list[int], Any, torch.Tensor | None]]
        if differentiates or len(used) < len(lengths):
            weights: Sequence[torch.Tensor | None] = [None] * len(lengths)
            if ctx.wants_input:
                weights = [weight.to(rows.dtype) for weight in ctx.weights] if differentiates else rows.split(lengths)
            parts = [([number], gradients[number], weights[number]) for number in used]
        else:
            parts = [(used, torch.cat(gradients, -1), rows)]  # type: ignore[arg-type]
        input_gradient = None
        of_weights: dict[int, torch.Tensor] = {}
        of_biases: dict[int, torch.Tensor] = {}
        for numbers, gradient, weight in parts:
            sizes = [lengths[number] for number in numbers]
            if weight is not None:
                share = gradient @ weight
                input_gradient = share if input_gradient is None else input_gradient + share
            if ctx.wants_weights:
                of_weights.update(zip(numbers, _cut((gradient.t() @ input).to(ctx.dtype), sizes), strict=True))
            if ctx.wants_biases:
                of_biases.update(zip(numbers, _cut(gradient.sum(0).to(ctx.dtype), sizes), strict=True))
        order = range(len(lengths))
        bias_gradients = map(of_biases.get, order) if ctx.has_bias else ()
        return (input_gradient, None, None, None, None, *map(of_weights.get, order), *bias_gradients)


def _cut(gradient: torch.Tensor, lengths: list[int]) -> Sequence[torch.Tensor]:
    """Split a gradient into the linears' rows, without a copy. Each slice may be modified in place."""
    try:
        return torch.unsafe_split_with_sizes(gradient, lengths, 0)
    except RuntimeError:  # a batched gradient (`is_grads_batched=True`) is not supported
        return gradient.split(lengths)


def _check_versions(ctx: Any, used: Iterable[int]) -> None:
    """Raise if a weight that a gradient needs has changed since the forward.

    Raises:
        RuntimeError: The same as torch's.
    """
    for number in used:
        weight, version = ctx.weights[number], ctx.versions[number]
        if version is not None and weight._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight of shape {tuple(weight.shape)}, of a group of projections, is at version {weight._version}; "
                f"expected version {version} instead."
            )
