"""Passes over the vocabulary in tiles: each tile multiplies many tokens with few rows of the weight.

Each row of the weight is read once. The gradient of a tile's weights is one product over all tokens, accumulated in the
widest precision and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nrl_models.logprobs.logit_buffers import FLOOR, Logits, OutputHead, Reference, add_product, multiply_, slices
from nrl_models.logprobs.sampling import Sampling

BLOCK = 4096
"""Tokens in a tile of logits that does not span the vocabulary."""


class RowSums(NamedTuple):
    """Statistics of each row of logits from the forward, `(tokens,)` each.

    Attributes:
        log_sum: Logarithm of the sum of exponentials.
        entropies, kl: Zero unless they were computed.
        bound: Tokens with logits below this cannot be sampled.
        reference_sum: Logarithm of the reference's sum of exponentials.
    """

    log_sum: torch.Tensor
    entropies: torch.Tensor
    kl: torch.Tensor
    bound: torch.Tensor
    reference_sum: torch.Tensor


def reduce_by_tiles(
    logits_of: Logits,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    log_sum: torch.Tensor,
    elements: int,
) -> None:
    """Fill `chosen` and `log_sum`, `(tokens,)` each, with sums of exponentials that are added up over tiles.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
    """
    vocabulary = len(logits_of.weight)
    block, tile = _tile_shape(len(hidden), vocabulary, elements)
    for rows in slices(len(hidden), block):
        total = torch.full_like(log_sum[rows], float("-inf"))
        picked = torch.zeros_like(total)
        for columns in slices(vocabulary, tile):
            logits = logits_of.before_temperature(hidden[rows], columns)
            inside, places = _within(tokens[rows], columns)
            picked = torch.where(inside, logits_of.of_tokens(logits, places), picked)
            total = torch.logaddexp(total, logits_of.log_sum_exp(logits))
        log_sum[rows] = total
        chosen[rows] = picked - total


def gradients_by_tiles(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    upstream: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sums: RowSums,
    *,
    head: OutputHead,
    sampling: Sampling,
    entropy: bool,
    reference: Reference | None,
    elements: int,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of hidden states, weight and bias. Gradients that are not needed are None.

    Args:
        hidden, weight, bias, tokens: Inputs of the forward.
        upstream: Gradients of log-probabilities, entropies and divergences, `(tokens,)` each.
        sums: Sums computed by the forward.
        head, sampling, entropy, reference: Options of the forward.
        elements: Number of logits per tile.
        needs: Whether each gradient is needed.
    """
    of_logprobs, of_entropy, of_kl = upstream
    log_sum, entropies, kl, bound, reference_sum = sums
    needs_hidden, needs_weight, needs_bias = needs
    wide = log_sum.dtype
    weighed = entropy or reference is not None
    block, tile = _tile_shape(len(hidden), len(weight), elements)
    logits_of = Logits(head, weight, bias, sampling.temperature, block * tile)
    fused = logits_of.fuses and not weighed and not sampling.truncates
    reference_of: Any = reference and reference.logits(sampling.temperature, block * tile)
    work: Any = hidden.new_empty(block * tile, dtype=wide) if weighed else None
    of_hidden: Any = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
    of_weight: Any = torch.zeros_like(weight) if needs_weight else None
    of_bias: Any = torch.zeros_like(bias) if needs_bias and bias is not None else None
    for columns in slices(len(weight), tile):
        tile_weight = weight[columns]
        of_tile: Any = of_weight[columns] if needs_weight else None
        if needs_weight and wide != weight.dtype:
            of_tile = torch.zeros_like(tile_weight, dtype=wide)
        for rows in slices(len(hidden), block):
            inside, places = _within(tokens[rows], columns)
            if fused:
                logits = logits_of.before_temperature(hidden[rows], columns)
                own_places = tokens[rows] - columns.start
                gradient = logits_of.logprob_gradient(logits, log_sum[rows], of_logprobs[rows], own_places)
            else:
                # In one buffer: logits, then log-probabilities, then probabilities, then the logits' gradient.
                gradient = logits_of(hidden[rows], columns)
                slope = logits_of.slope(gradient)
                dropped = gradient < bound[rows, None] if sampling.truncates else None
                gradient.sub_(log_sum[rows, None])
                if dropped is not None:
                    gradient.masked_fill_(dropped, float("-inf"))
                factor = of_logprobs[rows, None].neg()
                if weighed:
                    logs = work[: gradient.numel()].view_as(gradient)
                    torch.clamp(gradient, min=FLOOR, out=logs)
                    if reference is not None:
                        theirs = reference_of(reference.hidden[rows], columns).to(wide)
                        theirs.sub_(reference_sum[rows, None]).clamp_(min=FLOOR)
                        theirs.add_(kl[rows, None]).neg_().add_(logs).mul_(of_kl[rows, None])
                        factor = theirs.add_(factor)
                    if entropy:
                        factor = logs.add_(entropies[rows, None]).mul_(of_entropy[rows, None]).neg_().add_(factor)
                gradient.exp_().mul_(factor)
                gradient.scatter_add_(1, places[:, None], torch.where(inside, of_logprobs[rows], 0.0)[:, None])
                multiply_(gradient, slope)
            if of_bias is not None:
                of_bias[columns] += gradient.sum(0, dtype=wide).to(of_bias.dtype)
            gradient = logits_of.narrowed(gradient)
            if needs_hidden:
                add_product(of_hidden[rows], gradient, tile_weight)
            if needs_weight:
                add_product(of_tile, gradient.t(), hidden[rows])
        if needs_weight and wide != weight.dtype:
            of_weight[columns] = of_tile.to(weight.dtype)
    return of_hidden.to(hidden.dtype) if needs_hidden else None, of_weight, of_bias


def _tile_shape(count: int, vocabulary: int, elements: int) -> tuple[int, int]:
    """Return the number of tokens and of weight rows in a tile of at most `elements` logits."""
    block = max(1, min(count, BLOCK))
    return block, max(1, min(vocabulary, elements // block))


def _within(tokens: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens are in a tile of the vocabulary, and their columns in it (or any column), `(tokens,)` each.

    Does not use indices whose number depends on data, because a GPU would have to be synchronized.
    """
    inside = (tokens >= columns.start) & (tokens < columns.stop)
    return inside, (tokens - columns.start).clamp(0, columns.stop - columns.start - 1)
