"""Locations of the parameters of a group's linears, to check that they have not moved."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from nrl_models.common.projections.memory import Buffer


class JoinedWeights(NamedTuple):
    """Arguments of `joined_linear` other than the input."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    weight_rows: torch.Tensor
    bias_rows: torch.Tensor | None
    lengths: tuple[int, ...]

    def learn_alike(self) -> bool:
        """Return True if all weights agree on `requires_grad`, and all biases do too."""
        if not torch.is_grad_enabled():
            return True
        return all(len({tensor.requires_grad for tensor in tensors}) < 2 for tensors in (self.weights, self.biases))


class BufferLayout:
    """Locations of the linears' parameters. Does not keep the memory alive.

    Args:
        weights: Buffer of the weights.
        biases: Buffer of the biases, if the linears have some.
    """

    __slots__ = ("bias_places", "biases", "lengths", "weight_places", "weights")

    def __init__(self, weights: Buffer, biases: Buffer | None) -> None:
        self.weights, self.biases = weakref.ref(weights), None if biases is None else weakref.ref(biases)
        self.lengths = weights.lengths
        self.weight_places = weights.places()
        self.bias_places = (None,) * len(self.lengths) if biases is None else biases.places()

    def weights_of(self, linears: Iterable[nn.Module | None]) -> JoinedWeights | None:
        """Return the parameters of `linears` and their buffers if all parameters are in place; else None.

        The objects may be new: under tensor parallelism, a plain tensor over this rank's memory replaces a parameter.
        """
        weight_buffer = self.weights()
        bias_buffer = None if self.biases is None else self.biases()
        if weight_buffer is None or (self.biases is not None and bias_buffer is None):
            return None
        weights: list[torch.Tensor] = []
        biases: list[torch.Tensor] = []
        dtype = weight_buffer.rows.dtype
        for linear, weight_place, bias_place in zip(linears, self.weight_places, self.bias_places, strict=True):
            if linear is None:
                return None
            parameters = linear._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if weight is None or not _is_at(weight, weight_place, dtype):
                return None
            weights.append(weight)
            if bias is not None and bias_place is not None and _is_at(bias, bias_place, dtype):
                biases.append(bias)
            elif bias is not None or bias_place is not None:
                return None
        return JoinedWeights(
            weights, biases, weight_buffer.rows, None if bias_buffer is None else bias_buffer.rows, self.lengths
        )


def _is_at(tensor: torch.Tensor, place: tuple[int, torch.Size], dtype: torch.dtype) -> bool:
    """Return True if a plain tensor or parameter is the contiguous memory at `place` (a pointer and a shape)."""
    kind = type(tensor)
    return (
        (kind is nn.Parameter or kind is torch.Tensor)
        and tensor.data_ptr() == place[0]
        and tensor.shape == place[1]
        and tensor.dtype is dtype
        and tensor.is_contiguous()
    )
