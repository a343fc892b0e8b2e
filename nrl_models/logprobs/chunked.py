"""Log-probabilities from hidden states without full logits, forward and backward.

The forward reduces each row of logits to a few numbers. From these, any tile of the logits' gradient can be computed
separately, so the backward iterates over the vocabulary in tiles (`nrl_models.logprobs.tiles`). The forward also uses
tiles if only log-probabilities are requested, because it then reads each weight once for many tokens. Truncation,
entropy and a reference need complete rows of logits, and process some tokens per pass
(`nrl_models.logprobs.whole_rows`).

Logits are not kept, so the backward computes them again. There are two exceptions:

- If the output embedding is frozen and only log-probabilities are requested, the forward also computes their gradients
  by the hidden states. The backward multiplies them by the incoming gradient.
- If the loss is known in the forward (`ahead`), the forward computes all its gradients. The backward uses them if the
  incoming gradient is a multiple of that loss's gradient. Otherwise it computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nrl_models.common.upstream_torch import functorch_transforms_are_active
from nrl_models.common.value_checks import is_integer
from nrl_models.errors import HeadError, UnknownArgumentError, UnknownOptionError, shown
from nrl_models.logprobs.fused import fuses
from nrl_models.logprobs.logit_buffers import (
    ADVICE,
    CHUNK_ELEMENTS,
    FLOOR,
    FUSED_CHUNK_ELEMENTS,
    Logits,
    OutputHead,
    Reference,
    TokenStatistics,
    slices,
)
from nrl_models.logprobs.sampling import Sampling, processed
from nrl_models.logprobs.tiles import RowSums, gradients_by_tiles, reduce_by_tiles
from nrl_models.logprobs.whole_rows import (
    Derivatives,
    HeadGradients,
    LossAhead,
    logit_gradient,
    reduce_rows,
)


def chunk_length(vocabulary: int, *, fused: bool = False) -> int:
    """Return the number of tokens per chunk of logits."""
    return max(16, (FUSED_CHUNK_ELEMENTS if fused else CHUNK_ELEMENTS) // vocabulary)


def loss_chunk_length(vocabulary: int, hidden_size: int, *, fused: bool = False) -> int:
    """Return the number of tokens per chunk if the forward computes the gradient of a loss.

    Each chunk then also reads and writes the gradient of all weights. With half as many tokens as the hidden size, this
    costs little compared with the matmuls on a CPU, and the logits need at most half of that gradient's memory. A GPU
    multiplies faster, and fused logits need half of the memory.
    """
    return max(chunk_length(vocabulary, fused=fused), hidden_size if fused else hidden_size // 2)


def chunked_statistics(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    sampling: Sampling,
    *,
    entropy: bool = False,
    reference: Reference | None = None,
    chunk_size: int | None = None,
    ahead: LossAhead | None = None,
) -> TokenStatistics:
    """Compute the log-probability of each token, and entropy and divergence if requested.

    Args:
        hidden: Input of the output embedding, `(tokens, hidden_size)`.
        head: The output embedding and the scaling after it.
        tokens: Token ids, `(tokens,)`.
        sampling: Temperature and truncation applied to the logits before the softmax.
        entropy: Whether to compute the entropy. If not, it is zero.
        reference: Reference of the divergence. Its logits are divided by the temperature but not truncated.
        chunk_size: Tokens per chunk. Default: as many as fit in `CHUNK_ELEMENTS`.
        ahead: A loss of these statistics whose gradient is computed in the forward. Saves time if the gradient in the
            backward is that of this loss, and has no effect otherwise. Ignored if an output embedding (the model's or
            the reference's) is not a plain linear, and for fp16, which needs the loss scale of the backward.

    Raises:
        ValueError: If a token is outside the head's vocabulary.
    """
    weight, bias = head.weight, head.bias
    if weight is None or (reference is not None and reference.head.weight is None):
        return _by_checkpointing(hidden, head, tokens, sampling, reference, chunk_size)
    _require_tokens(tokens, len(weight))
    hidden = hidden.to(head.autocast or hidden.dtype)
    if reference is not None:
        reference = reference._replace(hidden=reference.hidden.to(reference.head.autocast or reference.hidden.dtype))
    # Under autocast, or if FSDP computes in another dtype than that of the shards.
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    vocabulary, hidden_size = weight.shape
    fused = fuses(weight.device) and not (entropy or reference or sampling.truncates)
    size = chunk_size or chunk_length(vocabulary, fused=fused)
    passes = None
    if ahead is not None and torch.is_grad_enabled() and weight.dtype != torch.float16 and len(hidden):
        passes = ahead.passes(len(hidden), chunk_size or loss_chunk_length(vocabulary, hidden_size, fused=fused))
    derivatives = None if ahead is None or passes is None else ahead.derivatives
    with head.autocasting(hidden):
        logprobs, entropies, kl = _Chunked.apply(
            hidden, weight, bias, tokens, head, sampling.processing, entropy, reference, size, passes, derivatives
        )
    return TokenStatistics(logprobs, entropies, kl)


def chunk_tokens(chunk_size: int | str | None) -> int | None:
    """Return the number of tokens per chunk for a chunk size; None for "auto" and None.

    Raises:
        UnknownOptionError: If it is neither of these nor a number above 0.
        UnknownArgumentError: If a transform of torch.func is active, which needs full logits (None).
    """
    if chunk_size is not None and functorch_transforms_are_active():
        raise UnknownArgumentError(f"chunk_size={shown(chunk_size)}: {_NOT_TRANSFORMED}")
    if chunk_size is None or chunk_size == "auto":
        return None
    if isinstance(chunk_size, int) and is_integer(chunk_size, 1):
        return chunk_size
    raise UnknownOptionError(f"chunk_size={chunk_size!r}: expected a number of tokens above 0, 'auto' or None")


def statistics_of(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    sampling: Sampling,
    reference_logits: torch.Tensor | None = None,
) -> TokenStatistics:
    """Compute the statistics from full logits `(tokens, vocab_size)`, differentiable by autograd."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    sampling = sampling.processing
    logs = processed(logits, sampling).log_softmax(-1)
    chosen = logs.gather(-1, tokens[:, None])[:, 0]
    clamped = logs.clamp(min=FLOOR)  # avoid infinity times zero
    entropy = -(logs.exp() * clamped).sum(-1)
    kl = torch.zeros_like(entropy)
    if reference_logits is not None:
        theirs = (reference_logits.to(wide) / sampling.temperature).log_softmax(-1).clamp(min=FLOOR)
        kl = (logs.exp() * (clamped - theirs)).sum(-1)
    return TokenStatistics(chosen, entropy, kl)


def _require_tokens(tokens: torch.Tensor, vocabulary: int) -> None:
    lowest, highest = torch.stack(torch.aminmax(tokens)).tolist() if len(tokens) else (0, 0)
    if lowest < 0 or highest >= vocabulary:
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
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
    """Compute with autograd, one chunk at a time, for an output embedding that is not a plain linear (such as LoRA)."""

    def of_chunk(chunk: torch.Tensor, rows: slice) -> TokenStatistics:
        reference_logits = None
        if reference is not None:
            with torch.no_grad():
                reference_logits = reference.head(reference.hidden[rows])
        return statistics_of(head(chunk), tokens[rows], sampling, reference_logits)

    vocabulary = head.vocabulary(hidden) if len(hidden) else 1
    _require_tokens(tokens, vocabulary)
    size = chunk_size or chunk_length(vocabulary)
    chunks = [
        torch.utils.checkpoint.checkpoint(of_chunk, hidden[rows], rows, use_reentrant=False)
        for rows in slices(len(hidden), size)
    ]
    if not chunks:
        return TokenStatistics(*hidden.new_zeros(3, 0, dtype=torch.promote_types(hidden.dtype, torch.float32)))
    return TokenStatistics(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))


_NOT_TRANSFORMED = (
    "transforms of torch.func (grad, vmap, jvp) and forward-mode derivatives do not support chunks of logits. Call "
    "token_logprobs with chunk_size=None, or outside of the transform"
)


class _Chunked(torch.autograd.Function):
    """Function whose forward and backward process chunks of logits, see the module docstring."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnknownArgumentError(f"chunk_size: {_NOT_TRANSFORMED}")

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
        passes: list[slice] | None,
        derivatives_of: Callable[[TokenStatistics], Derivatives] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, vocabulary = len(hidden), len(weight)
        wide = torch.promote_types(weight.dtype, torch.float32)
        needs: tuple[bool, bool, bool] = ctx.needs_input_grad[:3]
        if not any(needs):
            passes = derivatives_of = None
        frozen = needs == (True, False, False) and passes is None and not (entropy or reference)
        if frozen:
            derivatives_of = _of_each
        passes = passes or list(slices(count, chunk_size))
        elements = vocabulary * max((rows.stop - rows.start for rows in passes), default=1)
        logits_of = Logits(head, weight, bias, sampling.temperature, elements)
        reference_of = None if reference is None else reference.logits(sampling.temperature, elements)
        plain = not (entropy or reference or sampling.truncates)
        fused = plain and logits_of.fuses
        chosen = hidden.new_zeros(count, dtype=wide)
        sums = RowSums(*hidden.new_zeros((5, count), dtype=wide))
        taken = None if derivatives_of is None else HeadGradients(hidden, weight, bias, needs, elements)
        derivatives = hidden.new_zeros((3, count), dtype=wide)
        if plain and taken is None:
            reduce_by_tiles(logits_of, hidden, tokens, chosen, sums.log_sum, elements)
            passes = []

        for rows in passes:
            if fused:
                logits = logits_of.before_temperature(hidden[rows])
                picked = logits_of.of_tokens(logits, tokens[rows])
                sums.log_sum[rows] = logits_of.log_sum_exp(logits)
                chosen[rows] = picked - sums.log_sum[rows]
            else:
                reduced = reduce_rows(
                    rows, logits_of, reference_of, hidden, tokens, sampling, entropy, reference, chosen, sums,
                    with_slope=taken is not None,
                )  # fmt: skip
            if taken is not None and derivatives_of is not None:
                by = derivatives_of(TokenStatistics(chosen, sums.entropies, sums.kl))
                by_logprobs, by_entropy, by_kl = (None if derivative is None else derivative[rows] for derivative in by)
                assert by_logprobs is not None
                by_logprobs = _of_possible(by_logprobs, chosen[rows])
                used = (by_logprobs, by_entropy, by_kl)
                for target, derivative in zip(derivatives[:, rows], used, strict=True):
                    if derivative is not None:
                        target.copy_(derivative)
                if fused:
                    gradient = logits_of.logprob_gradient(logits, sums.log_sum[rows], by_logprobs, tokens[rows])
                else:
                    gradient = logit_gradient(reduced, tokens[rows], sums.entropies[rows], sums.kl[rows], used)
                taken.add(rows, gradient, logits_of)

        ctx.of_forward = {"head": head, "sampling": sampling, "entropy": entropy, "reference": reference}
        ctx.elements = chunk_size * vocabulary
        ctx.of_each = taken.of_hidden if taken is not None and frozen else None
        ctx.taken = None if taken is None or frozen else (derivatives, taken.rounded())
        ctx.save_for_backward(hidden, weight, bias, tokens, chosen, *sums)
        return chosen, sums.entropies, sums.kl

    @staticmethod
    def backward(ctx: Any, of_logprobs: torch.Tensor, of_entropy: torch.Tensor, of_kl: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise HeadError(f"create_graph=True: chunks of log-probabilities have no second derivatives. {ADVICE}")
        hidden, weight, bias, tokens, chosen, *sums = ctx.saved_tensors
        upstream = (_of_possible(of_logprobs, chosen), of_entropy, of_kl)
        nothing = (None,) * 8
        if ctx.of_each is not None:
            return (upstream[0][:, None] * ctx.of_each).to(hidden.dtype), None, None, *nothing
        if ctx.taken is not None:
            derivatives, gradients = ctx.taken
            ctx.taken = None  # a second backward computes the gradient again
            factor = _proportion(torch.stack(upstream), derivatives)
            if factor is not None:
                scaled = (
                    gradient if gradient is None or factor == 1.0 else gradient.mul_(factor) for gradient in gradients
                )
                return *scaled, *nothing
            del gradients
        gradients = gradients_by_tiles(
            hidden, weight, bias, tokens, upstream, RowSums(*sums),
            **ctx.of_forward, elements=ctx.elements, needs=ctx.needs_input_grad[:3],
        )  # fmt: skip
        return *gradients, *nothing


def _of_possible(by_logprobs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return derivatives by log-probabilities; zero for tokens that cannot be sampled, whatever the weights are."""
    return by_logprobs.masked_fill(logprobs == float("-inf"), 0.0)


def _of_each(statistics: TokenStatistics) -> Derivatives:
    """Return the derivatives of the sum of all log-probabilities: ones."""
    return torch.ones_like(statistics.logprobs), None, None


def _proportion(upstream: torch.Tensor, derivatives: torch.Tensor) -> float | None:
    """Return the factor between the derivatives and the incoming gradient; None if they are not proportional."""
    arrived, expected = upstream.double(), derivatives.double()
    squared = expected.square().sum()
    factor = torch.where(squared > 0, (arrived * expected).sum() / squared, 0.0)
    rest = (arrived - factor * expected).abs().max()
    bound = 64 * torch.finfo(derivatives.dtype).eps * arrived.abs().max()
    value, rest_value, bound_value = torch.stack([factor, rest, bound]).tolist()  # synchronizes with a GPU once
    return value if rest_value <= bound_value else None
