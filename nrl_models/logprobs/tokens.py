"""Log-probabilities of the tokens of a batch, for RL trainers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from nrl_models.common.forward.documents import columns_before, prompts_are_shared, starts_of
from nrl_models.common.forward.packing import token_positions
from nrl_models.common.modules import innermost
from nrl_models.common.upstream import computes_positions
from nrl_models.errors import UnknownOptionError, parse_option
from nrl_models.logprobs.chunked import chunked_statistics, statistics_of
from nrl_models.logprobs.head import OutputHead, forward_inputs, hidden_states_and_head
from nrl_models.logprobs.logit_buffers import Reference, TokenStatistics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.whole_rows import Derivatives, LossAhead


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Statistics of each token, `(batch, length)` each, at the token's position.

    Attributes:
        logprobs: Log-probability of the token given the tokens before it, in fp32; 0 where `mask` is False.
        mask: True where there is a log-probability: not for padding, the first token of a sequence, tokens with `score`
            False, and tokens that `top_k` or `top_p` excludes.
        outside: True for tokens that `top_k` or `top_p` excludes (a log-probability of -inf). A consistent engine
            cannot have sampled them. They are not in `mask`, so that losses stay finite; count them.
        entropy: Entropy of the sampled distribution, in nats; None unless requested.
        kl: Divergence of that distribution from the reference's over the complete vocabulary, in nats; None without a
            reference.
        loss: A scalar; None unless a loss was passed.
    """

    logprobs: torch.Tensor
    mask: torch.Tensor
    outside: torch.Tensor
    entropy: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    loss: torch.Tensor | None = None


Loss = Callable[[TokenLogprobs], torch.Tensor]
"""A loss: a function of the result of `token_logprobs` that returns a scalar."""


class LossTerms(StrEnum):
    """Set of tokens whose log-probabilities a term of a loss reads."""

    TOKEN = "token"
    """One token: cross-entropy, GRPO, Dr. GRPO, DAPO."""
    SEQUENCE = "sequence"
    """A sequence: ratios of complete sequences."""


def token_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    score: torch.Tensor | None = None,
    entropy: bool = False,
    reference: nn.Module | None = None,
    loss: Loss | None = None,
    loss_terms: LossTerms | str | torch.Tensor = LossTerms.TOKEN,
    chunk_size: int | str | None = "auto",
    **model_inputs: Any,
) -> TokenLogprobs:
    """Compute the log-probability of each token of a batch, differentiable, and optionally a loss.

    The full logits are never materialized, neither forward nor backward: the output embedding is applied to a chunk of
    tokens at once. The softmax is in fp32 (fp64 for fp64 models).

    Args:
        model: A causal language model or vision-language model: of nrl_models, of transformers, or another with
            `get_output_embeddings()`. A scale or soft cap after its output embedding is detected.
        input_ids: `(batch, length)`. `position_ids` separate sequences packed into one row.
        attention_mask: `(batch, length)`, False or 0 for padding, on either side or between tokens.
        position_ids: `(batch, length)`. A sequence starts where they restart. By default the model computes its
            positions (from images, token IDs or the mask), or they count the tokens that the mask keeps.
        temperature, top_k, top_p: The engine's sampling parameters, see `Sampling`. Tokens that they exclude have no
            finite log-probability, see `TokenLogprobs.outside`.
        score: `(batch, length)` bool: tokens to score. The output embedding is applied only to these. Default: all.
        entropy: Compute the entropy.
        reference: A model with the same vocabulary to compute the divergence from. It gets no gradient. Its logits are
            divided by the temperature and not truncated.
        loss: A function of the returned object. Its value is the result's `loss`, and its gradient is computed while
            the logits of a chunk exist, so that the backward pass need not compute them again. It may be called
            before all log-probabilities are known, with zeros for the others, so it must be a pure function of its
            argument and of constant tensors. Gradients are correct for any use: the backward pass computes the logits
            again if the incoming gradient is not a multiple of this loss's gradient.
        loss_terms: Tokens that a term of the loss reads together, see `LossTerms`; or numbers `(batch,)` or `(batch,
            length)` that are equal for tokens read together (both answers of a pair, for DPO). Changes only the time.
            The logits of more than `chunk_size` tokens that are read together are computed twice.
        chunk_size: Number of tokens whose logits are held at once. "auto" holds 2^25 numbers (on a GPU
            2^27), or more with a loss if the gradient of the output embedding is larger. None uses the model's full
            logits, for models whose head is not a scale or a soft cap.
        model_inputs: Further arguments of the model's forward (`pixel_values`, ...), also for the reference.

    Raises:
        HeadError: The model ends with something other than a scale or soft cap, and `chunk_size` is not None.
        ValueError: Shapes differ, the reference has another vocabulary, or a sampling parameter is out of range.
        UnknownArgumentError: Unsupported arguments (`use_cache=True`, `labels`, ...), see `NOT_TAKEN`.
        UnknownOptionError: Unknown `loss_terms` or `chunk_size`.
    """
    sampling = Sampling(temperature, top_k, top_p)
    tokens_per_chunk = chunk_tokens(chunk_size)
    _require_shape(input_ids.shape, attention_mask=attention_mask, position_ids=position_ids, score=score)
    positions = scored_positions(input_ids, attention_mask, position_ids, score)
    inputs = forward_inputs(model_inputs)
    inputs |= _masks(model, attention_mask, position_ids, media=any(value is not None for value in inputs.values()))
    rows, columns, sizes = _in_order(positions, loss_terms, position_ids, attention_mask)
    tokens = input_ids[rows, columns]
    before = _before(rows, columns, position_ids)  # the hidden state that predicts a token is the one before it
    placed = _Placed(positions, (rows, columns), entropy, reference is not None, loss)
    if chunk_size is None:
        logits = _logits_at(model, input_ids, before, inputs)
        with torch.no_grad():
            reference_logits = None if reference is None else _logits_at(reference, input_ids, before, inputs)
        found = statistics_of(logits, tokens, sampling, reference_logits)
    else:
        hidden, head = hidden_states_and_head(model, input_ids, **inputs)
        found = chunked_statistics(
            hidden[before],
            head,
            tokens,
            sampling,
            entropy=entropy,
            reference=_reference(reference, head, hidden, input_ids, before, inputs),
            chunk_size=tokens_per_chunk,
            ahead=None if loss is None else LossAhead(placed.derivatives, sizes),
        )
    result = placed.result(found)
    return result if loss is None else replace(result, loss=placed.loss_of(result))


def scored_positions(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which tokens have a log-probability: `(batch, length)` bool.

    The first token of a sequence has none; neither do padding and a token that follows padding.
    """
    result = torch.ones_like(input_ids, dtype=torch.bool)
    result[:, 0] = False
    if attention_mask is not None:
        there = attention_mask.bool()
        result &= there
        result[:, 1:] &= there[:, :-1]
    if position_ids is not None:
        starts = starts_of(position_ids, attention_mask)
        result &= ~(starts & (position_ids == 0) if prompts_are_shared() else starts)
    return result if score is None else result & score.bool()


def _before(
    rows: torch.Tensor, columns: torch.Tensor, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and columns of the tokens before these."""
    return rows, columns - 1 if position_ids is None else columns_before(position_ids)[rows, columns]


def chunk_tokens(chunk_size: int | str | None) -> int | None:
    """Return the number of tokens per chunk for a chunk size; None for "auto" and None.

    Raises:
        UnknownOptionError: If it is neither of these nor a number above 0.
    """
    if chunk_size is None or chunk_size == "auto":
        return None
    if isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size > 0:
        return chunk_size
    raise UnknownOptionError(f"chunk_size={chunk_size!r}: expected a number of tokens above 0, 'auto' or None")


def _require_shape(shape: torch.Size, **tensors: torch.Tensor | None) -> None:
    wrong = [
        f"{name} {tuple(value.shape)}" for name, value in tensors.items() if value is not None and value.shape != shape
    ]
    if len(shape) != 2 or wrong:
        raise ValueError(
            f"input_ids has shape {tuple(shape)}, expected (batch, seq_len)"
            + (f"; expected the same shape of {', '.join(wrong)}" if wrong else "")
        )


def _masks(
    model: nn.Module, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, *, media: bool
) -> dict[str, torch.Tensor]:
    """Return the mask and position keywords of the model's forward.

    Positions that the caller passes go to the model as they are. Otherwise the model computes its own. Most models
    count columns, which is wrong only if padding comes before a token. Such a batch gets positions that count tokens,
    unless the model reads its positions from the mask, the images or the token ids. A mask without padding is left out.
    """
    inputs: dict[str, torch.Tensor] = {}
    if attention_mask is not None and not bool(attention_mask.all()):
        inputs["attention_mask"] = attention_mask
        inner = innermost(model)
        if (
            position_ids is None
            and "position_ids" in inspect.signature(inner.forward).parameters
            and not computes_positions(inner, media=media)
            and _has_padding_before_tokens(attention_mask)
        ):
            position_ids = token_positions(attention_mask)
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    return inputs


def _has_padding_before_tokens(attention_mask: torch.Tensor) -> bool:
    token = attention_mask.bool()
    return bool((token[:, 1:] & ~token[:, :-1]).any())


def _reference(
    reference: nn.Module | None,
    head: OutputHead,
    ours_hidden: torch.Tensor,
    input_ids: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor],
    inputs: dict[str, Any],
) -> Reference | None:
    if reference is None:
        return None
    with torch.no_grad():
        hidden, reference_head = hidden_states_and_head(reference, input_ids, **inputs)
    ours, theirs = head.vocabulary(ours_hidden), reference_head.vocabulary(hidden)
    if ours != theirs:
        raise ValueError(f"the model has a vocabulary of {ours} and the reference one of {theirs}: they must agree")
    return Reference(hidden[before], reference_head)


def _logits_at(
    model: nn.Module, input_ids: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], inputs: dict[str, Any]
) -> torch.Tensor:
    """Return the model's own logits at some positions. Skips other columns if the model supports that."""
    rows, columns = places
    if "logits_to_keep" not in inspect.signature(innermost(model).forward).parameters or not len(columns):
        return model(input_ids=input_ids, use_cache=False, **inputs).logits[rows, columns]
    kept, among_kept = columns.unique(return_inverse=True)
    return model(input_ids=input_ids, use_cache=False, logits_to_keep=kept, **inputs).logits[rows, among_kept]


@dataclass(frozen=True, slots=True)
class _Placed:
    """Scatters the statistics of scored tokens to their positions.

    Args:
        positions: `(batch, seq_len)` bool, True for scored tokens.
        places: Rows and columns of the scored tokens, in the order of the statistics.
        entropy, kl: Whether the statistics have these.
        loss: The loss of the result.
    """

    positions: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor]
    entropy: bool
    kl: bool
    loss: Loss | None

    def result(self, found: TokenStatistics) -> TokenLogprobs:
        """What `token_logprobs` returns, but for the loss."""
        finite = found.logprobs != float("-inf")
        mask = self._grid(finite)
        return TokenLogprobs(
            self._grid(torch.where(finite, found.logprobs, 0.0)),
            mask,
            self.positions & ~mask,
            self._grid(found.entropy) if self.entropy else None,
            self._grid(found.kl) if self.kl else None,
        )

    def loss_of(self, result: TokenLogprobs) -> torch.Tensor:
        """The loss, a scalar."""
        assert self.loss is not None
        found = self.loss(result)
        if not isinstance(found, torch.Tensor) or found.ndim:
            shown = tuple(found.shape) if isinstance(found, torch.Tensor) else found
            raise ValueError(f"the loss returned {shown}: expected a tensor without dimensions, the loss of the batch")
        return found

    def derivatives(self, found: TokenStatistics) -> Derivatives:
        """Of the loss by each of the statistics."""
        with torch.enable_grad():
            leaves = TokenStatistics(*(values.detach().clone().requires_grad_() for values in found))
            loss = self.loss_of(self.result(leaves))
            if not loss.requires_grad:
                return torch.zeros_like(found.logprobs), None, None
            logprobs, entropy, kl = torch.autograd.grad(loss, leaves, allow_unused=True)
        return torch.zeros_like(found.logprobs) if logprobs is None else logprobs, entropy, kl

    def _grid(self, values: torch.Tensor) -> torch.Tensor:
        """Return a grid with `values` at the scored positions, and zero elsewhere."""
        zeros = torch.zeros(self.positions.shape, dtype=values.dtype, device=values.device)
        return zeros.index_put(self.places, values)


def _in_order(
    positions: torch.Tensor,
    terms: LossTerms | str | torch.Tensor,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, list[int] | None]:
    """Return rows and columns of the scored tokens, with the tokens of each term adjacent, and the terms' sizes."""
    rows, columns = positions.nonzero(as_tuple=True)
    if isinstance(terms, torch.Tensor):
        if terms.shape not in (positions.shape, positions.shape[:1]):
            expected = f"{tuple(positions.shape)} or {tuple(positions.shape[:1])}"
            raise ValueError(f"expected loss_terms of {expected}, got {tuple(terms.shape)}")
        numbers = terms.to(positions.device)[rows] if terms.ndim == 1 else terms.to(positions.device)[rows, columns]
    elif parse_option(LossTerms, terms, "loss_terms", "or term numbers per token or sequence") is LossTerms.TOKEN:
        return rows, columns, None
    else:
        numbers = _document_numbers(positions, position_ids, attention_mask)[rows, columns]
    numbers, order = numbers.sort(stable=True)
    return rows[order], columns[order], numbers.unique_consecutive(return_counts=True)[1].tolist()


def _document_numbers(
    positions: torch.Tensor, position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """A number for each sequence, `(batch, length)`."""
    if position_ids is None:
        position_ids = torch.arange(positions.shape[1], device=positions.device).expand(positions.shape)
    return starts_of(position_ids, attention_mask).flatten().cumsum(0).view_as(positions)
