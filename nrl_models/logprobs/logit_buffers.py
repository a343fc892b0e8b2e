"""Logits of a chunk of tokens in reused memory, and the statistics of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from nrl_models.logprobs.fused import fuses, log_sum_exp, logprob_gradient_, run_fused
from nrl_models.logprobs.head import OutputHead

CHUNK_ELEMENTS, FUSED_CHUNK_ELEMENTS = 2**25, 2**27
"""Logits held at a time, in forward and backward: 128 MiB in fp32, and 256 MiB in bf16 if they are fused. A GPU would
wait for the launches of smaller chunks."""

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
        """Computes its logits in the dtype of the hidden states, at most `elements` at a time."""
        weight, bias = self.head.weight, self.head.bias
        assert weight is not None
        dtype = self.hidden.dtype
        return Logits(self.head, weight.to(dtype), None if bias is None else bias.to(dtype), temperature, elements)


def slices(length: int, size: int) -> Iterator[slice]:
    """`length` numbers, at most `size` at a time."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class Logits:
    """Logits of some tokens and some rows of the weight, in buffers that are reused.

    Args:
        head, weight, bias: The output embedding, and its parameters in the dtype of the matmul.
        temperature: Divisor of processed logits.
        elements: Maximum number of logits.

    Attributes:
        wide: Dtype of processed logits: fp32, or fp64 for fp64 weights.
        fuses: Sums and gradients are computed by compiled functions, see `nrl_models.logprobs.fused`.
    """

    def __init__(
        self, head: OutputHead, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float, elements: int
    ) -> None:
        self.head, self.weight, self.bias, self.temperature = head, weight, bias, temperature
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.buffer = weight.new_empty(elements)
        self.fuses = fuses(weight.device)
        self._wide_buffer: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Processed logits `(tokens, vocabulary in rows)`, fp32 or wider; valid until the next call."""
        return self._processed(self.before_temperature(hidden, rows))

    def before_temperature(self, hidden: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The model's logits `(tokens, vocabulary in rows)`, in the weight's dtype; valid until the next call."""
        weight = self.weight[rows]
        shape = (len(hidden), len(weight))
        logits = self.buffer[: shape[0] * shape[1]].view(shape)
        if self.bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(self.bias[rows], hidden, weight.t(), out=logits)
        return self.head.finish_(logits)

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Divide by the temperature, in the wide buffer."""
        if self.wide != logits.dtype:
            if self._wide_buffer is None:
                self._wide_buffer = self.buffer.new_empty(self.buffer.shape, dtype=self.wide)
            logits = self._wide_buffer[: logits.numel()].view(logits.shape).copy_(logits)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def of_tokens(self, logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Processed logits at one column of each row of `before_temperature`, `(tokens,)`."""
        return logits.gather(1, places[:, None])[:, 0].to(self.wide) / self.temperature

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        """Logarithm of the sum of exponentials of `before_temperature`, `(tokens,)`. May overwrite the logits."""
        if self.fuses:
            return run_fused(log_sum_exp, logits, self.temperature, self.wide)
        logits = self._processed(logits)
        largest = logits.amax(1).clamp(min=FLOOR)  # also for a row of -inf the sum is zero
        return largest + logits.sub_(largest[:, None]).exp_().sum(1).log()

    def logprob_gradient(
        self, logits: torch.Tensor, log_sum: torch.Tensor, by_logprobs: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of a loss by the output embedding's result, in the memory of `before_temperature`.

        Args:
            logits, log_sum: Logits, and logarithm of the sum of exponentials over the vocabulary.
            by_logprobs: Derivatives of the loss by log-probabilities, `(tokens,)`.
            places: Column of each token; any other number if its column is not among `logits`.
        """
        head = self.head
        return run_fused(
            logprob_gradient_, logits, log_sum, by_logprobs, places, self.temperature, head.scale, head.cap
        )

    def narrowed(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of logits in the weight's dtype, ready for a product; the logits are gone then."""
        if gradient.dtype == self.buffer.dtype:
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
