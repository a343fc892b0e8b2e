"""Log-probabilities from hidden states without full logits, forward and backward.

The forward reduces each row of logits to a few numbers. These are enough to compute any tile of the logits' gradient by
itself, so the backward iterates over the vocabulary in tiles: the gradient of a tile's weights is then a single product
over all tokens, summed in the widest precision and rounded once. The forward does the same where only log-probabilities
are asked for, since a product of many tokens with few weights reads each weight once; what needs whole rows of logits
(truncation, entropy, a reference) processes a chunk of tokens at a time. The logits are computed twice, because they
are not kept, except where the output embedding is frozen: then the forward also computes the gradient of the hidden
states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from nrl_models.logprobs.head import OutputHead
from nrl_models.logprobs.sampling import Sampling, processed, smallest_kept

CHUNK_ELEMENTS = 2**25
"""Logits held at a time, in forward and backward: 128 MiB in fp32."""

BLOCK = 4096
"""Tokens in a tile of logits that does not span the vocabulary."""

_FLOOR = -1e30
"""Stands for -inf where it would be multiplied by a probability of zero."""


class TokenStatistics(NamedTuple):
    """The statistics of each row of logits: `(tokens,)` each, fp32 or wider.

    Attributes:
        logprobs: of the given tokens; -inf for a token that cannot be sampled.
        entropy: of the distribution they are sampled from, in nats.
        kl: its Kullback-Leibler divergence from the reference's distribution, in nats; zero without a reference.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor


class Reference(NamedTuple):
    """Another model's hidden states `(tokens, hidden)` for the same tokens, and its head."""

    hidden: torch.Tensor
    head: OutputHead

    def logits(self, temperature: float, elements: int) -> _Logits:
        """Computes its logits, at most `elements` at a time."""
        assert self.head.weight is not None
        return _Logits(self.head, self.head.weight, self.head.bias, temperature, elements)


def chunk_length(vocabulary: int) -> int:
    """The number of tokens whose logits are held at a time."""
    return max(16, CHUNK_ELEMENTS // vocabulary)


def chunked_statistics(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    sampling: Sampling,
    *,
    entropy: bool = False,
    reference: Reference | None = None,
    chunk_size: int | None = None,
) -> TokenStatistics:
    """Log-probability of each token, and entropy and divergence if asked for.

    Args:
        hidden: `(tokens, hidden)`: the input of the output embedding.
        head: the output embedding and what follows it.
        tokens: `(tokens,)`: ids.
        sampling: how logits are processed before the softmax.
        entropy: whether to compute the entropy; it is zero otherwise.
        reference: what to compute the divergence from. Its logits are divided by the temperature, but not truncated.
        chunk_size: tokens at a time; by default as many as fit `CHUNK_ELEMENTS`.

    Raises:
        ValueError: a token outside the vocabulary of the head.
    """
    weight, bias = head.weight, head.bias
    if weight is None:
        return _by_checkpointing(hidden, head, tokens, sampling, reference, chunk_size)
    _require_tokens(tokens, len(weight))
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    size = chunk_size or chunk_length(weight.shape[0])
    logprobs, entropies, kl = _Chunked.apply(
        hidden, weight, bias, tokens, head, sampling.processing, entropy, reference, size
    )
    return TokenStatistics(logprobs, entropies, kl)


def statistics_of(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    sampling: Sampling,
    reference_logits: torch.Tensor | None = None,
) -> TokenStatistics:
    """The same from full logits `(tokens, vocabulary)`, differentiable by autograd."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    sampling = sampling.processing
    logs = processed(logits, sampling).log_softmax(-1)
    chosen = logs.gather(-1, tokens[:, None])[:, 0]
    kept = logs.clamp(min=_FLOOR)  # so that nothing is infinite times zero
    entropy = -(logs.exp() * kept).sum(-1)
    kl = torch.zeros_like(entropy)
    if reference_logits is not None:
        theirs = (reference_logits.to(wide) / sampling.temperature).log_softmax(-1).clamp(min=_FLOOR)
        kl = (logs.exp() * (kept - theirs)).sum(-1)
    return TokenStatistics(chosen, entropy, kl)


def _require_tokens(tokens: torch.Tensor, vocabulary: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        some = ", ".join(str(token) for token in outside.unique()[:5].tolist())
        raise ValueError(f"token ids {some} are outside the output embedding's vocabulary of {vocabulary}")


def _by_checkpointing(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    sampling: Sampling,
    reference: Reference | None,
    chunk_size: int | None,
) -> TokenStatistics:
    """For output embeddings that are not a plain linear (with LoRA, say): autograd, a chunk at a time."""

    def of_chunk(chunk: torch.Tensor, rows: slice) -> TokenStatistics:
        reference_logits = None
        if reference is not None:
            with torch.no_grad():
                reference_logits = reference.head(reference.hidden[rows])
        return statistics_of(head(chunk), tokens[rows], sampling, reference_logits)

    size = chunk_size or chunk_length(getattr(head.module, "out_features", 2**17))
    chunks = [
        torch.utils.checkpoint.checkpoint(of_chunk, hidden[rows], rows, use_reentrant=False)
        for rows in _slices(len(hidden), size)
    ]
    return TokenStatistics(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class _Logits:
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

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """The derivative of processed logits by the output embedding's result."""
        if self.head.cap is None:
            return self.head.scale / self.temperature
        return self.head.slope(logits * self.temperature) / self.temperature


class _Chunked(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        head: OutputHead,
        sampling: Sampling,
        entropy: bool,
        reference: Reference | None,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, vocabulary = len(hidden), len(weight)
        wide = torch.promote_types(weight.dtype, torch.float32)
        chunk_size = min(chunk_size, max(count, 1))
        logits_of = _Logits(head, weight, bias, sampling.temperature, chunk_size * vocabulary)
        reference_of: Any = reference and reference.logits(sampling.temperature, chunk_size * vocabulary)
        chosen, log_sum, entropies, kl, bound, reference_sum = hidden.new_zeros((6, count), dtype=wide)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        frozen = needs_hidden and not (needs_weight or needs_bias)
        pulls: Any = (
            hidden.new_zeros((1 + entropy + (reference is not None), *hidden.shape), dtype=wide) if frozen else None
        )
        work: Any = hidden.new_empty(chunk_size * vocabulary, dtype=wide) if frozen else None
        weighed = entropy or reference is not None
        by_tiles = not (frozen or weighed or sampling.truncates)
        if by_tiles:
            _reduce_by_tiles(logits_of, hidden, tokens, chosen, log_sum, chunk_size * vocabulary)

        for rows in () if by_tiles else _slices(count, chunk_size):
            logits = logits_of(hidden[rows])
            picked = logits.gather(1, tokens[rows, None])[:, 0]
            slope: Any = logits_of.slope(logits) if frozen else None
            if sampling.truncates:
                bound[rows] = smallest_kept(logits, sampling)[:, 0]
                logits.masked_fill_(logits < bound[rows, None], float("-inf"))
                picked = picked.masked_fill(picked < bound[rows], float("-inf"))
            largest = logits.amax(1)
            logits.sub_(largest[:, None])
            shifted: Any = logits.clone().clamp_(min=_FLOOR) if weighed else None
            total = logits.exp_().sum(1)
            log_total = total.log()
            log_sum[rows] = largest + log_total
            chosen[rows] = picked - log_sum[rows]
            mean: Any = None
            if weighed:
                mean = torch.linalg.vecdot(logits, shifted) / total
                if entropy:
                    entropies[rows] = log_total - mean
            theirs: Any = None
            if reference is not None:
                theirs = reference_of(reference.hidden[rows])
                reference_sum[rows] = theirs.logsumexp(1)
                theirs.sub_(reference_sum[rows, None]).clamp_(min=_FLOOR)
                kl[rows] = mean - log_total - torch.linalg.vecdot(logits, theirs) / total
            if frozen:
                logits.div_(total[:, None])
                logs = shifted.sub_(log_total[:, None]) if weighed else None
                of_entropy = entropies[rows] if entropy else None
                derivatives = _by_logits(logits, logs, theirs, tokens[rows], of_entropy, kl[rows], work)
                for pull, gradient in zip(pulls[:, rows], derivatives, strict=True):
                    if isinstance(slope, torch.Tensor) or slope != 1.0:
                        gradient.mul_(slope)
                    pull.copy_(gradient.to(weight.dtype) @ weight)

        ctx.head, ctx.sampling, ctx.reference, ctx.entropy = head, sampling, reference, entropy
        ctx.elements = chunk_size * vocabulary
        ctx.save_for_backward(hidden, weight, bias, tokens, chosen, log_sum, entropies, kl, bound, reference_sum, pulls)
        return chosen, entropies, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: torch.Tensor, of_entropy: torch.Tensor, of_kl: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, chosen, log_sum, entropies, kl, bound, reference_sum, pulls = ctx.saved_tensors
        # A token that cannot be sampled has log-probability -inf, whatever the weights are.
        of_logprobs = of_logprobs.masked_fill(chosen == float("-inf"), 0.0)
        nothing = (None,) * 6
        if pulls is not None:
            upstream = [of_logprobs, *([of_entropy] if ctx.entropy else []), *([of_kl] if ctx.reference else [])]
            total: Any = sum(grad[:, None] * pull for grad, pull in zip(upstream, pulls, strict=True))
            return total.to(hidden.dtype), None, None, *nothing

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = chosen.dtype
        weighed = ctx.entropy or ctx.reference is not None
        block, tile = _tile_shape(len(hidden), len(weight), ctx.elements)
        logits_of = _Logits(ctx.head, weight, bias, ctx.sampling.temperature, block * tile)
        reference_of: Any = ctx.reference and ctx.reference.logits(ctx.sampling.temperature, block * tile)
        work: Any = hidden.new_empty(block * tile, dtype=wide) if weighed else None
        narrow = None if wide == weight.dtype else logits_of.buffer
        of_hidden: Any = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
        of_weight: Any = torch.zeros_like(weight) if needs_weight else None
        of_bias: Any = torch.zeros_like(bias) if needs_bias else None
        for columns in _slices(len(weight), tile):
            tile_weight = weight[columns]
            of_tile: Any = of_weight[columns] if needs_weight else None
            if needs_weight and wide != weight.dtype:
                of_tile = torch.zeros_like(tile_weight, dtype=wide)
            for rows in _slices(len(hidden), block):
                # In one buffer: logits, then log-probabilities, then probabilities, then the logits' gradient.
                gradient = logits_of(hidden[rows], columns)
                slope = logits_of.slope(gradient)
                dropped = gradient < bound[rows, None] if ctx.sampling.truncates else None
                gradient.sub_(log_sum[rows, None])
                if dropped is not None:
                    gradient.masked_fill_(dropped, float("-inf"))
                factor = of_logprobs[rows, None].neg()
                if weighed:
                    logs = work[: gradient.numel()].view_as(gradient)
                    torch.clamp(gradient, min=_FLOOR, out=logs)
                    if ctx.reference:
                        theirs = reference_of(ctx.reference.hidden[rows], columns)
                        theirs.sub_(reference_sum[rows, None]).clamp_(min=_FLOOR)
                        theirs.add_(kl[rows, None]).neg_().add_(logs).mul_(of_kl[rows, None])
                        factor = theirs.add_(factor)
                    if ctx.entropy:
                        factor = logs.add_(entropies[rows, None]).mul_(of_entropy[rows, None]).neg_().add_(factor)
                gradient.exp_().mul_(factor)
                inside, places = _within(tokens[rows], columns)
                gradient[inside, places] += of_logprobs[rows][inside]
                if isinstance(slope, torch.Tensor) or slope != 1.0:
                    gradient.mul_(slope)
                if needs_bias:
                    of_bias[columns] += gradient.sum(0).to(of_bias.dtype)
                if narrow is not None:
                    gradient = narrow[: gradient.numel()].view_as(gradient).copy_(gradient)
                if needs_hidden:
                    _add_product(of_hidden[rows], gradient, tile_weight)
                if needs_weight:
                    _add_product(of_tile, gradient.t(), hidden[rows])
            if needs_weight and wide != weight.dtype:
                of_weight[columns] = of_tile.to(weight.dtype)
        return of_hidden.to(hidden.dtype) if needs_hidden else None, of_weight, of_bias, *nothing


def _tile_shape(count: int, vocabulary: int, elements: int) -> tuple[int, int]:
    """How many tokens and how many rows of the weight make a tile of at most `elements` logits."""
    block = max(1, min(count, BLOCK))
    return block, max(1, min(vocabulary, elements // block))


def _within(tokens: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the tokens are in a tile of the vocabulary, and their places in it."""
    inside = ((tokens >= columns.start) & (tokens < columns.stop)).nonzero()[:, 0]
    return inside, tokens[inside] - columns.start


def _reduce_by_tiles(
    logits_of: _Logits,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    log_sum: torch.Tensor,
    elements: int,
) -> None:
    """Fill `chosen` and `log_sum`, `(tokens,)` each, the sum of exponentials rescaled as larger logits turn up.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
    """
    vocabulary = len(logits_of.weight)
    block, tile = _tile_shape(len(hidden), vocabulary, elements)
    for rows in _slices(len(hidden), block):
        largest = torch.full_like(log_sum[rows], _FLOOR)
        total, picked = torch.zeros_like(largest), torch.zeros_like(largest)
        for columns in _slices(vocabulary, tile):
            logits = logits_of(hidden[rows], columns)
            inside, places = _within(tokens[rows], columns)
            picked[inside] = logits[inside, places]
            larger = torch.maximum(largest, logits.amax(1))
            total.mul_((largest - larger).exp_()).add_(logits.sub_(larger[:, None]).exp_().sum(1))
            largest = larger
        log_sum[rows] = largest + total.log()
        chosen[rows] = picked - log_sum[rows]


def _add_product(target: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """`target += first @ second`; in the product's own dtype if it is the target's."""
    if target.dtype == first.dtype:
        target.addmm_(first, second)
    else:
        target.add_(first @ second)


def _by_logits(
    probabilities: torch.Tensor,
    logs: Any,
    theirs: torch.Tensor | None,
    tokens: torch.Tensor,
    entropies: torch.Tensor | None,
    kl: torch.Tensor,
    work: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """The derivatives of each row's log-probability, entropy and divergence by the logits, in turn in `work`.

    Args:
        probabilities, logs, theirs: `(tokens, vocabulary)`: of the distribution, and the reference's logarithms.
        tokens, entropies, kl: `(tokens,)`; without entropies or a reference there are no such derivatives.
        work: at least as many elements as `probabilities`.
    """
    gradient = work[: probabilities.numel()].view_as(probabilities)
    torch.neg(probabilities, out=gradient)
    yield gradient.scatter_add_(1, tokens[:, None], torch.ones_like(gradient[:, :1]))
    if entropies is not None:
        yield torch.add(logs, entropies[:, None], out=gradient).mul_(probabilities).neg_()
    if theirs is not None:
        yield torch.sub(logs, theirs, out=gradient).sub_(kl[:, None]).mul_(probabilities)
