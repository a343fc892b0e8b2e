"""Logits of a chunk of tokens in reused memory, and the statistics of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from nrl_models.logprobs.head import OutputHead

CHUNK_ELEMENTS = 2**25
"""Logits held at a time, in forward and backward: 128 MiB in fp32."""

FLOOR = -1e30
"""Replaces -inf where it would be multiplied by a probability of zero."""


class TokenStatistics(NamedTuple):
    """Statistics of each row of logits, `(tokens,)` each, at least fp32.

    Attributes:
        logprobs: Log-probability of the token; -inf if it cannot be sampled.
        entropy: Entropy of the sampling distribution, in nats.
        kl: Kullback-Leibler divergence from the reference's distribution, in nats; zero without a reference.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor


class Reference(NamedTuple):
    """Another model's hidden states `(tokens, hidden)` for the same tokens, and its head."""

    hidden: torch.Tensor
    head: OutputHead

    def logits(self, temperature: float, elements: int) -> Logits:
        """Computes its logits, at most `elements` at a time."""
        assert self.head.weight is not None
        return Logits(self.head, self.head.weight, self.head.bias, temperature, elements)


def slices(length: int, size: int) -> Iterator[slice]:
    """`length` numbers, at most `size` at a time."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class Logits:
    """Processed logits of some tokens and some rows of the weight, in a buffer that is reused."""

    def __init__(
        self, head: OutputHead, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float, elements: int
    ) -> None:
        self.head, self.weight, self.bias, self.temperature = head, weight, bias, temperature
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.buffer = weight.new_empty(elements)
        self.wide_buffer = self.buffer if self.wide == weight.dtype else weight.new_empty(elements, dtype=self.wide)

    def __call__(self, hidden: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """`(tokens, vocabulary in rows)`, fp32 or wider; valid until the next call."""
        weight = self.weight[rows]
        shape = (len(hidden), len(weight))
        logits = self.buffer[: shape[0] * shape[1]].view(shape)
        if self.bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(self.bias[rows], hidden, weight.t(), out=logits)
        self.head.finish_(logits)
        if self.wide_buffer is not self.buffer:
            logits = self.wide_buffer[: logits.numel()].view(shape).copy_(logits)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def narrowed(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of logits in the weight's dtype, ready for a product; the logits are gone then."""
        if self.wide_buffer is self.buffer:
            return gradient
        return self.buffer[: gradient.numel()].view_as(gradient).copy_(gradient)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """The derivative of processed logits by the output embedding's result."""
        if self.head.cap is None:
            return self.head.scale / self.temperature
        return self.head.slope(logits * self.temperature) / self.temperature


def multiply_(gradient: torch.Tensor, slope: torch.Tensor | float) -> torch.Tensor:
    """Multiply `gradient` by `slope` in place."""
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient.mul_(slope)


def add_product(target: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """`target += first @ second`; in the product's own dtype if it is the target's."""
    if target.dtype == first.dtype:
        target.addmm_(first, second)
    else:
        target.add_(first @ second)
