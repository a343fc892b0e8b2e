"""Passes over complete rows of logits, a chunk of tokens per pass. Truncation, entropy, divergence and losses need
them.

If the loss is known in the forward, its gradient is computed while a chunk's logits are in memory. The output embedding
is then multiplied three times (logits, gradient of the hidden states, gradient of the weights). A backward that
recomputes the logits needs four multiplications. This requires that the derivative of the loss by a chunk's
log-probabilities does not depend on later chunks. So all tokens of a term of the loss are in one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from nrl_models.logprobs.logit_buffers import FLOOR, Logits, Reference, TokenStatistics, add_product, multiply_, slices
from nrl_models.logprobs.sampling import Sampling, smallest_kept
from nrl_models.logprobs.tiles import RowSums

Derivatives = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Derivatives of a loss by each token's log-probability, entropy and divergence, `(tokens,)` each; None if unused."""


def has_gradient(loss: torch.Tensor) -> bool:
    """Return True if a loss depends on the log-probabilities. A constant 0, as for a batch without tokens, does not.

    Raises:
        ValueError: If it is another constant: the gradient would silently be 0. Also in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode() permits no gradients: call with a loss outside of it")
    if not loss.requires_grad and bool(loss != 0):
        raise ValueError(
            f"the loss {loss.item():g} does not depend on the log-probabilities that it gets, so it has no gradient: "
            "compute it from them without detach() and item()"
        )
    return loss.requires_grad


@dataclass(frozen=True, slots=True)
class LossAhead:
    """A loss whose gradient is computed in the forward.

    Args:
        derivatives: Computes the derivatives from the statistics of all tokens, with zeros for later chunks. Only the
            derivatives of the current chunk are used.
        sizes: Numbers of consecutive tokens that a term of the loss reads together; None if each is separate.
    """

    derivatives: Callable[[TokenStatistics], Derivatives]
    sizes: Sequence[int] | None = None

    def passes(self, count: int, most: int) -> list[slice] | None:
        """Split `count` tokens into passes of at most `most` tokens.

        Tokens that a term of the loss reads together stay in one pass. Returns None if they are more than `most`.
        """
        if self.sizes is None:
            return list(slices(count, math.ceil(count / math.ceil(count / most))))  # passes of about the same size
        bounds = [0]
        end = 0
        for size in self.sizes:
            if size > most:
                return None
            if end + size - bounds[-1] > most:
                bounds.append(end)
            end += size
        return [slice(start, stop) for start, stop in pairwise([*bounds, end])]


class Reduced(NamedTuple):
    """Statistics of some rows, in buffers that are valid until the next rows.

    Attributes:
        exponentials: Exponentials of the logits minus the row's maximum, `(tokens, vocab_size)`.
        total, log_total: Sum of `exponentials`, and its logarithm, `(tokens,)`.
        shifted: Logits minus the row's maximum; None if neither entropy nor divergence is requested.
        theirs: Log-probabilities of the reference, or None.
        slope: Derivative of the logits by the output embedding's result.
    """

    exponentials: torch.Tensor
    total: torch.Tensor
    log_total: torch.Tensor
    shifted: torch.Tensor | None
    theirs: torch.Tensor | None
    slope: torch.Tensor | float


def reduce_rows(
    rows: slice,
    logits_of: Logits,
    reference_of: Logits | None,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    sampling: Sampling,
    entropy: bool,
    reference: Reference | None,
    chosen: torch.Tensor,
    sums: RowSums,
    *,
    with_slope: bool,
) -> Reduced:
    """Fill the statistics of some tokens, in `chosen` and `sums`."""
    logits = logits_of(hidden[rows])
    picked = logits.gather(1, tokens[rows, None])[:, 0]
    slope: torch.Tensor | float = logits_of.slope(logits) if with_slope else 1.0
    if sampling.truncates:
        sums.bound[rows] = smallest_kept(logits, sampling)[:, 0]
        logits.masked_fill_(logits < sums.bound[rows, None], float("-inf"))
        picked = picked.masked_fill(picked < sums.bound[rows], float("-inf"))
    largest = logits.amax(1)
    logits.sub_(largest[:, None])
    weighed = entropy or reference is not None
    shifted = logits.clone().clamp_(min=FLOOR) if weighed else None
    total = logits.exp_().sum(1)
    log_total = total.log()
    sums.log_sum[rows] = largest + log_total
    chosen[rows] = picked - sums.log_sum[rows]
    theirs = None
    if shifted is not None:
        mean = _dot(logits, shifted) / total
        if entropy:
            sums.entropies[rows] = log_total - mean
        if reference is not None and reference_of is not None:
            theirs = reference_of(reference.hidden[rows]).to(logits.dtype)
            sums.reference_sum[rows] = theirs.logsumexp(1)
            theirs.sub_(sums.reference_sum[rows, None]).clamp_(min=FLOOR)
            sums.kl[rows] = mean - log_total - _dot(logits, theirs) / total
    return Reduced(logits, total, log_total, shifted, theirs, slope)


def _dot(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the dot product of each row, in the dtype of the rows also under autocast."""
    with torch.autocast(first.device.type, enabled=False):
        return torch.linalg.vecdot(first, second)


def logit_gradient(
    reduced: Reduced, tokens: torch.Tensor, entropies: torch.Tensor, kl: torch.Tensor, by: Derivatives
) -> torch.Tensor:
    """Compute the gradient of a loss by the output embedding's result, in the memory of the exponentials.

    Args:
        reduced: The rows. Their buffers are overwritten.
        tokens, entropies, kl: Values of these rows, `(tokens,)`.
        by: Derivatives of the loss for these rows.
    """
    by_logprobs, by_entropy, by_kl = by
    gradient = reduced.exponentials
    if reduced.shifted is None or (by_entropy is None and by_kl is None):
        gradient.mul_((-by_logprobs / reduced.total)[:, None])
    else:
        none = torch.zeros_like(by_logprobs)
        by_entropy, by_kl = (none if derivative is None else derivative for derivative in (by_entropy, by_kl))
        factor = reduced.shifted.sub_(reduced.log_total[:, None]).mul_((by_kl - by_entropy)[:, None])
        if reduced.theirs is not None:
            factor.sub_(reduced.theirs.mul_(by_kl[:, None]))
        factor.sub_((by_logprobs + by_entropy * entropies + by_kl * kl)[:, None])
        gradient.mul_(factor.div_(reduced.total[:, None]))
    gradient.scatter_add_(1, tokens[:, None], by_logprobs[:, None])
    return multiply_(gradient, reduced.slope)


class HeadGradients:
    """Gradients of hidden states, weight and bias, accumulated in the widest precision over chunks of tokens.

    Args:
        hidden, weight, bias: Inputs of the forward.
        needs: Whether each gradient is needed.
        elements: Maximum number of elements of a product that is rounded before it is accumulated.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: tuple[bool, bool, bool],
        elements: int,
    ) -> None:
        self.inputs, self.weight = hidden, weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.tile = len(weight) if wide == weight.dtype else max(1, elements // hidden.shape[1])
        self.of_hidden = torch.zeros_like(hidden) if needs[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.of_bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None

    def add(self, rows: slice, gradient: torch.Tensor, logits_of: Logits) -> None:
        """Add the gradients of some tokens. `gradient`, by the output embedding's result, is overwritten."""
        if self.of_bias is not None:
            self.of_bias += gradient.sum(0, dtype=self.of_bias.dtype)
        gradient = logits_of.narrowed(gradient)
        if self.of_hidden is not None:
            torch.mm(gradient, self.weight, out=self.of_hidden[rows])
        if self.of_weight is not None:
            for columns in slices(len(self.weight), self.tile):
                add_product(self.of_weight[columns], gradient[:, columns].t(), self.inputs[rows])

    def rounded(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients in the dtypes of the tensors that they belong to."""
        dtype = self.weight.dtype
        of_weight, of_bias = (
            None if gradient is None else gradient.to(dtype) for gradient in (self.of_weight, self.of_bias)
        )
        return self.of_hidden, of_weight, of_bias
