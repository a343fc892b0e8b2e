"""Forward and backward of a batch, one microbatch after the other.

A loss is a function of the complete batch, but microbatches run one by one. While a microbatch runs, the
log-probabilities of later ones are still zero. The derivatives of the loss are final anyway if each term of the loss
only reads tokens of one microbatch. This is verified once all log-probabilities are known. Microbatches with other
derivatives run again, and the difference of the gradients is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature

from nrl_models.common.documents.boundaries import sharing_prompts
from nrl_models.common.forward.random_states import random_states_kept, set_torch_random_state, torch_random_state
from nrl_models.common.forward.routing import own_routing, routing_is_observed, tokens_placed
from nrl_models.common.forward.token_places import TokenPlaces
from nrl_models.logprobs.microbatches import Microbatch, RowLayout, largest, ranks_of
from nrl_models.logprobs.tokens import LossFunction, LossTerms, TokenLogprobs, token_logprobs
from nrl_models.logprobs.whole_rows import has_gradient

STATISTICS = ("logprobs", "entropy", "kl")
"""Inputs of a loss that may get gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBatch:
    """All sequences of a batch.

    Attributes:
        ids: Token ids of each sequence, `(length,)` int64 on the CPU.
        scores: Whether each token is scored, `(length,)` bool per sequence, on the CPU.
        device: Device of the model.
        model_inputs: Keyword arguments of the forward for each sequence, on any device. Empty if there are none.
        scored: Tokens with a log-probability, `(batch, max_length)` bool on the model's device.
        lengths: Number of tokens of each sequence, on the CPU.
    """

    ids: list[torch.Tensor]
    scores: list[torch.Tensor]
    device: torch.device
    model_inputs: Sequence[Mapping[str, Any]] = ()
    scored: torch.Tensor = field(init=False)
    lengths: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Compute `scored` and `lengths`. The first token of a sequence is never scored."""
        grid = torch.zeros(0, 0, dtype=torch.bool)
        if self.ids:
            grid = pad_sequence(self.scores, batch_first=True)
            grid[:, 0] = False
        object.__setattr__(self, "scored", grid.to(self.device))
        object.__setattr__(self, "lengths", torch.tensor([len(row) for row in self.ids], dtype=torch.long))


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchInputs:
    """A microbatch of shape `(rows, seq_len)`.

    Attributes:
        ids: Token ids.
        inputs: Mask or position ids that separate its sequences. For a single sequence, also its model inputs.
        places: Sequence index and position of each token of its sequences.
        sources: Row and column of each of these tokens. Sequences that share a prompt have its tokens in common.
        score: bool, True for tokens to score.
        shares: Whether sequences share prompts.
    """

    ids: torch.Tensor
    inputs: dict[str, Any]
    places: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]
    score: torch.Tensor
    shares: bool

    @classmethod
    def of(cls, batch: SequenceBatch, part: Microbatch, layout: RowLayout) -> MicrobatchInputs:
        """Create the inputs of a microbatch on the CPU, without GPU synchronization, and copy them to the device."""
        numbers, shared = part.numbers, part.shared

        def laid(tensors: list[torch.Tensor]) -> torch.Tensor:
            if layout is not RowLayout.PACKED:
                return pad_sequence(tensors, batch_first=True)
            return torch.cat([tensor[size:] for tensor, size in zip(tensors, shared, strict=True)])[None]

        def moved(*grids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(grid.to(batch.device) for grid in grids)

        rows = [batch.ids[number] for number in numbers]
        positions = [torch.arange(len(row)) for row in rows]
        there = laid([torch.ones_like(row, dtype=torch.bool) for row in rows])
        inputs: dict[str, Any] = {}
        if batch.model_inputs:
            (number,) = numbers
            inputs = dict(batch.model_inputs[number])
        elif len(rows) > 1 and layout is RowLayout.PACKED:
            (inputs["position_ids"],) = moved(laid(positions))
        elif len(rows) > 1:
            (inputs["attention_mask"],) = moved(there)
        sequences = [torch.full_like(row, number) for row, number in zip(rows, numbers, strict=True)]
        sources: tuple[torch.Tensor, ...] = there.nonzero(as_tuple=True)
        if layout is RowLayout.PACKED:
            sources = _sources(part, [len(each) for each in rows])
        ids, score = moved(laid(rows), laid([batch.scores[number] for number in numbers]))
        places = moved(torch.cat(sequences), torch.cat(positions))
        return cls(ids, inputs, places, moved(*sources), score, any(shared))

    def placed(self, values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Return `grid` `(sequences, longest)` with this microbatch's `values` `(rows, length)` written into it."""
        return grid.index_put(self.places, values[self.sources])

    def copied(self, grid: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
        """Return `onto` with the values of `grid` at this microbatch's tokens."""
        return onto.index_put(self.places, grid[self.places])

    def taken(self, grid: torch.Tensor) -> torch.Tensor:
        """Return this microbatch's values `(rows, length)` of `grid`, zero for padding.

        Tokens of a shared prompt have the value of any of its sequences.
        """
        zeros = torch.zeros(self.ids.shape, dtype=grid.dtype, device=grid.device)
        return zeros.index_put(self.sources, grid[self.places])

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient by this microbatch's values, `(rows, length)`. Tokens of a shared prompt get the sum."""
        zeros = torch.zeros(self.ids.shape, dtype=gradient.dtype, device=gradient.device)
        return zeros.index_put(self.sources, gradient[self.places], accumulate=self.shares)


def _sources(part: Microbatch, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of each token of each sequence in a packed row."""
    columns, first, end = [], 0, 0
    for length, shared in zip(lengths, part.shared, strict=True):
        if not shared:
            first = end
        unshared = length - shared
        columns += [torch.arange(first, first + shared), torch.arange(end, end + unshared)]
        end += unshared
    column = torch.cat(columns)
    return torch.zeros_like(column), column


class Accumulation:
    """Runs the microbatches.

    Args:
        model: The model.
        batch: All sequences.
        parts: The microbatches.
        count: Number of microbatches that the ranks of the group run.
        options: Keywords of `token_logprobs`.
        loss, loss_terms, group: See `rollout_logprobs`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: SequenceBatch,
        parts: list[MicrobatchInputs],
        count: int,
        options: dict[str, Any],
        loss: LossFunction | None,
        loss_terms: LossTerms | str | torch.Tensor,
        group: Any,
    ) -> None:
        self.model, self.batch, self.parts, self.count, self.options = model, batch, parts, count, options
        self.loss, self.loss_terms, self.group = loss, loss_terms, group
        self.models = [model] if options["reference"] is None else [model, options["reference"]]
        nothing = torch.zeros_like(batch.scored)
        self.known = TokenLogprobs(nothing.float(), batch.scored, nothing)
        self.used: dict[str, torch.Tensor] = {}

    def run(self) -> TokenLogprobs:
        """Run all microbatches. Return the final statistics, with the loss if there is one."""
        if self.loss is None:
            with torch.no_grad():
                for part in self.parts:
                    with self._placing(part):
                        self.known = self._joined(part, self._scored(part))
                self._nothing(self.count - len(self.parts))
            return self.known
        states = []
        for part in self.parts:
            states.append(torch_random_state())
            with self._placing(part):
                self._learn(part)
        self._nothing(self.count - len(self.parts))
        loss, by = self._derivatives(last=True) if self.parts else (self.known.logprobs.sum(), {})
        again = [index for index, part in enumerate(self.parts) if self._differs(part, by)]
        (count,) = largest([len(again)], self.group, self.batch.device)
        for index in again:
            rest = {name: gradient - self.used[name] for name, gradient in by.items()}
            with self._placing(self.parts[index]):
                with random_states_kept():
                    set_torch_random_state(states[index])  # repeats the dropout masks
                    statistics = self._scored(self.parts[index])
                self._pull(self.parts[index], statistics, rest)
        self._nothing(count - len(again))
        return replace(self.known, loss=loss)

    def _placing(self, part: MicrobatchInputs) -> AbstractContextManager[None]:
        """Let records and replays of experts, which belong to the complete batch, find this microbatch's tokens."""
        if not routing_is_observed():
            return nullcontext()
        places = torch.arange(self.batch.scored.numel(), device=self.batch.device).view(self.batch.scored.shape)
        return tokens_placed(TokenPlaces(part.taken(places + 1) - 1, self.batch.lengths), *self.models)

    def _scored(self, part: MicrobatchInputs, **loss: Any) -> TokenLogprobs:
        inputs = part.inputs
        if self.batch.model_inputs:
            inputs = BatchFeature(inputs).to(self.batch.device, next(self.model.parameters()).dtype).data
        keywords: dict[str, Any] = {"score": part.score, **inputs, **self.options, **loss}
        with sharing_prompts() if part.shares else nullcontext():
            return token_logprobs(self.model, part.ids, **keywords)

    def _joined(self, part: MicrobatchInputs, statistics: TokenLogprobs) -> TokenLogprobs:
        """Merge the statistics of a microbatch into the known ones, `(batch, max_length)` each."""
        grids = {}
        for name in STATISTICS:
            values, grid = getattr(statistics, name), getattr(self.known, name)
            if values is not None:
                grid = torch.zeros_like(self.known.logprobs) if grid is None else grid
                grids[name] = part.placed(values, grid.to(values.dtype))
        outside = part.placed(statistics.outside, self.known.outside)
        return TokenLogprobs(mask=self.batch.scored & ~outside, outside=outside, **grids)

    def _learn(self, part: MicrobatchInputs) -> None:
        """Run a microbatch's forward and backward, and record the derivatives that it used."""
        assert self.loss is not None
        loss, terms = self.loss, self.loss_terms
        if isinstance(terms, torch.Tensor):
            of_tokens = terms.to(self.batch.device)[:, None].expand_as(self.batch.scored)
            terms = part.taken(of_tokens)
        with torch.enable_grad():
            statistics = self._scored(part, loss=lambda row: loss(self._joined(part, row)), loss_terms=terms)
        with torch.no_grad():
            self.known = self._joined(part, statistics)
        _, by = self._derivatives()
        self._pull(part, statistics, by)
        for name, gradient in by.items():
            used = self.used.get(name, torch.zeros_like(gradient))
            self.used[name] = part.copied(gradient, used)

    def _derivatives(self, *, last: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the known values, and its derivative by each statistic (zero at unscored tokens).

        The last call also computes gradients of terms that do not depend on the statistics, such as a weight norm.
        """
        assert self.loss is not None
        grids = {name: grid for name in STATISTICS if (grid := getattr(self.known, name)) is not None}
        with torch.enable_grad():
            leaves = {name: grid.clone().requires_grad_() for name, grid in grids.items()}
            loss = self.loss(replace(self.known, **leaves))
            if has_gradient(loss):
                loss.backward(inputs=None if last else list(leaves.values()))
        by = {}
        for name, leaf in leaves.items():
            by[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.masked_fill(~self.batch.scored, 0.0)
        return loss.detach(), by

    def _pull(self, part: MicrobatchInputs, statistics: TokenLogprobs, by: dict[str, torch.Tensor]) -> None:
        """Accumulate gradients of the parameters from derivatives by a microbatch's statistics."""
        gradients = [part.summed(gradient) for gradient in by.values()]
        if ranks_of(self.group) == 1 and not any(gradient.any() for gradient in gradients):
            return  # no gradient, for example because all rewards of a group are equal
        if not statistics.logprobs.requires_grad:
            raise ValueError("a loss was passed, but no parameter of the model requires a gradient: unfreeze some")
        with torch.autocast(self.batch.device.type, enabled=False):  # a backward repeats the forward's dtypes
            torch.autograd.backward([getattr(statistics, name) for name in by], gradients)

    def _differs(self, part: MicrobatchInputs, by: dict[str, torch.Tensor]) -> bool:
        """Return True if a microbatch used derivatives that differ from the final ones by more than rounding."""
        for name, gradient in by.items():
            bound = 64 * torch.finfo(gradient.dtype).eps * gradient.abs().max()
            if not bool(((gradient - self.used[name])[part.places].abs() <= bound).all()):
                return True
        return False

    def _nothing(self, count: int) -> None:
        """Run `count` microbatches that contribute nothing, because other ranks have more microbatches."""
        token = self.batch.ids[0][:1] if self.batch.ids else torch.zeros(1, dtype=torch.long)
        with own_routing(*self.models):
            for _ in range(count):
                with torch.set_grad_enabled(self.loss is not None):
                    statistics = token_logprobs(self.model, token.repeat(2)[None].to(self.batch.device), **self.options)
                if self.loss is not None:
                    with torch.autocast(self.batch.device.type, enabled=False):
                        statistics.logprobs.backward(torch.zeros_like(statistics.logprobs))
