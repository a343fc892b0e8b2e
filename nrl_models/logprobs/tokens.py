"""Log-probabilities of the tokens of a batch, for RL trainers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from nrl_models.common.config.causality import require_causal
from nrl_models.common.config.forward_keywords import require_spelling
from nrl_models.common.documents.boundaries import columns_before, prompts_are_shared, starts_of
from nrl_models.common.documents.media_positions import text_positions
from nrl_models.common.forward.routing import places_unknown
from nrl_models.common.modules import innermost
from nrl_models.errors import UnknownArgumentError, parse_option, shown
from nrl_models.logprobs.chunked import chunk_tokens, chunked_statistics, statistics_of
from nrl_models.logprobs.head import hidden_states_and_head, logits_at, require_head
from nrl_models.logprobs.logit_buffers import OutputHead, Reference, TokenStatistics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.token_inputs import (
    LeftPadding,
    forward_inputs,
    mask_and_positions,
    positions_of_boundaries,
    require_grids,
    require_known_tokens,
    require_planes,
    require_unpacked,
    require_zeros_and_ones,
)
from nrl_models.logprobs.whole_rows import Derivatives, LossAhead, has_gradient


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
        kl: KL(model || reference) of the token's distribution, summed over the vocabulary, in nats; None without a
            reference.
        loss: A scalar; None unless a loss was passed.
    """

    logprobs: torch.Tensor
    mask: torch.Tensor
    outside: torch.Tensor
    entropy: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    loss: torch.Tensor | None = None


LossFunction = Callable[[TokenLogprobs], torch.Tensor]
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
    loss: LossFunction | None = None,
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
        position_ids: `(batch, length)`. A sequence starts where they restart. By default, and if they only count the
            tokens of a row, the model computes its positions (from images, token IDs or the mask), or counts tokens.
            With M-RoPE also `(3, batch, length)`, with one sequence per row, or `(4, batch, length)`, where the first
            plane separates sequences.
        temperature, top_k, top_p: The engine's sampling parameters, see `Sampling`. Tokens that they exclude have no
            finite log-probability, see `TokenLogprobs.outside`.
        score: `(batch, length)` bool: tokens to score. The output embedding is applied only to these. Default: all.
        entropy: Compute the entropy.
        reference: A model with the same vocabulary to compute the divergence from. It gets no gradient. Its logits are
            divided by the temperature and not truncated.
        loss: A function of the returned object. Its value is the result's `loss`, and its gradient is computed while
            the logits of a chunk exist. The backward pass computes them again only if the incoming gradient is not a
            multiple of this loss's gradient. The function may be called before all log-probabilities are known, with
            zeros for the others, so it must be a pure function of its argument and of constant tensors.
        loss_terms: Tokens that a term of the loss reads together, see `LossTerms`; or numbers `(batch,)` or `(batch,
            length)` that are equal for tokens read together (both answers of a pair, for DPO). Changes only the time.
            The logits of more than `chunk_size` tokens that are read together are computed twice.
        chunk_size: Number of tokens whose logits are held at once. "auto" holds 2^25 numbers (on a GPU
            2^27), or more with a loss if the gradient of the output embedding is larger. None uses the model's full
            logits, for models whose head is not a scale or a soft cap.
        model_inputs: Further arguments of the model's forward (`pixel_values`, ...), also for the reference.

    Raises:
        HeadError: The model's head is not a scale or soft cap, and `chunk_size` is not None. Or it has an encoder, is a
            masked language model, reads later tokens, or computes other columns than `input_ids` (GIT with images).
        ValueError: Shapes differ, the reference has another vocabulary, or a sampling parameter is out of range.
        UnknownArgumentError: Unsupported arguments (`use_cache=True`, `labels`, ...), see `NOT_TAKEN`. Also packed rows
            with PEFT's prompt learning or activated LoRA, and left padding while experts are recorded or replayed if
            left padding changes the model's results. Also in transforms of torch.func, unless `chunk_size` is None.
        DeviceError: Weights are on meta.
        UnknownOptionError: Unknown `loss_terms` or `chunk_size`.

    Examples:
        >>> import torch
        >>> from nrl_models import AutoModelForCausalLM, token_logprobs
        >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint", dtype=torch.float32)
        >>> token_logprobs(model, torch.tensor([[11, 12, 13]])).logprobs.shape
        torch.Size([1, 3])
    """
    sampling = Sampling(temperature, top_k, top_p)
    require_grids(input_ids, attention_mask=attention_mask, position_ids=position_ids, score=score)
    tokens_per_chunk = chunk_tokens(chunk_size)
    require_zeros_and_ones(attention_mask=attention_mask, score=score)
    if loss is not None and not callable(loss):
        raise UnknownArgumentError(f"loss={shown(loss)}: expected a function of the log-probabilities")
    inputs = forward_inputs(model_inputs)
    wrapped = [model] if reference is None else [model, reference]
    require_head(wrapped, chunk_size, inputs)
    models = [innermost(part) for part in wrapped]
    require_spelling(models[0], inputs, ARGUMENTS)
    input_ids = input_ids.long()
    require_known_tokens(models, input_ids)
    require_causal(wrapped, input_ids, inputs)
    require_planes(models, position_ids)
    position_ids = positions_of_boundaries(models[0], input_ids, attention_mask, position_ids, inputs)
    starting = text_positions(models[0], position_ids)
    require_unpacked(wrapped, starting, attention_mask)
    padding = LeftPadding.of(attention_mask, models, inputs)
    if padding is not None:
        grids = {"attention_mask": attention_mask, "score": score}
        with places_unknown(MOVED, *wrapped):
            moved = token_logprobs(
                model,
                padding.moved(input_ids),
                **{name: padding.moved(value) for name, value in grids.items()},
                position_ids=padding.moved_positions(position_ids),
                **padding.moved_inputs(inputs),
                **asdict(sampling),
                entropy=entropy,
                reference=reference,
                loss=None if loss is None else lambda statistics: loss(padding.restored(statistics, STATISTICS)),
                loss_terms=padding.moved(loss_terms),
                chunk_size=chunk_size,
            )
        return padding.restored(moved, STATISTICS)
    positions = scored_positions(input_ids, attention_mask, starting, score)
    media = any(value is not None for value in inputs.values())
    inputs |= mask_and_positions(model, attention_mask, position_ids, media=media)
    rows, columns, sizes = _in_order(positions, loss_terms, starting, attention_mask)
    tokens = input_ids[rows, columns]
    before = _before(rows, columns, starting)  # the hidden state that predicts a token is the one before it
    placed = _Placed(positions, (rows, columns), entropy, reference is not None, loss)
    if chunk_size is None:
        logits = logits_at(model, input_ids, before, inputs)
        with torch.no_grad():
            reference_logits = None if reference is None else logits_at(reference, input_ids, before, inputs)
        statistics = statistics_of(logits, tokens, sampling, reference_logits)
    else:
        hidden, head = hidden_states_and_head(model, input_ids, **inputs)
        compared = _reference(reference, head, hidden, input_ids, before, inputs)
        statistics = chunked_statistics(
            hidden[before],
            head,
            tokens,
            sampling,
            entropy=entropy,
            reference=compared,
            chunk_size=tokens_per_chunk,
            ahead=None if loss is None else LossAhead(placed.derivatives, sizes),
        )
        for each in (head, compared and compared.head):
            if each is not None:
                each.free()
    result = placed.result(statistics)
    return result if loss is None else replace(result, loss=placed.loss_of(result))


ARGUMENTS = frozenset(inspect.signature(token_logprobs).parameters) - {"model_inputs"}
MOVED = (
    "attention_mask has padding on the left, which changes this model's results, so rows are moved to the left: "
    "expected padding on the right while experts are recorded or replayed, or call rollout_logprobs"
)
"""Error of records and replays of experts, whose choices would belong to other tokens."""
STATISTICS = ("logprobs", "mask", "outside", "entropy", "kl")


def scored_positions(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the tokens that have a log-probability: a `(batch, length)` bool mask.

    Padding, the first token of a sequence, and a token after padding have none.
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
    """Return rows and columns of the preceding tokens."""
    return rows, columns - 1 if position_ids is None else columns_before(position_ids)[rows, columns]


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
    loss: LossFunction | None

    def result(self, statistics: TokenStatistics) -> TokenLogprobs:
        """Return the result of `token_logprobs`, without the loss."""
        finite = statistics.logprobs != float("-inf")
        mask = self._grid(finite)
        return TokenLogprobs(
            self._grid(torch.where(finite, statistics.logprobs, 0.0)),
            mask,
            self.positions & ~mask,
            self._grid(statistics.entropy) if self.entropy else None,
            self._grid(statistics.kl) if self.kl else None,
        )

    def loss_of(self, result: TokenLogprobs) -> torch.Tensor:
        """Compute the loss, and check that it is a scalar."""
        assert self.loss is not None
        loss = self.loss(result)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            shown = tuple(loss.shape) if isinstance(loss, torch.Tensor) else loss
            raise ValueError(f"the loss returned {shown}: expected a tensor without dimensions, the loss of the batch")
        return loss

    def derivatives(self, statistics: TokenStatistics) -> Derivatives:
        """Return the derivatives of the loss by each statistic."""
        with torch.enable_grad():
            leaves = TokenStatistics(*(values.detach().clone().requires_grad_() for values in statistics))
            loss = self.loss_of(self.result(leaves))
            if not has_gradient(loss):
                return torch.zeros_like(statistics.logprobs), None, None
            logprobs, entropy, kl = torch.autograd.grad(loss, leaves, allow_unused=True)
        return torch.zeros_like(statistics.logprobs) if logprobs is None else logprobs, entropy, kl

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
    """Return the number of the sequence that each token belongs to, `(batch, length)`."""
    if position_ids is None:
        position_ids = torch.arange(positions.shape[1], device=positions.device).expand(positions.shape)
    return starts_of(position_ids, attention_mask).flatten().cumsum(0).view_as(positions)
