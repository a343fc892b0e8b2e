"""A step of supervised training: cross-entropy, DPO, or the ranking loss of a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from nrl_models.common.forward.evaluation import autocast, evaluating
from nrl_models.logprobs import LossTerms, TokenLogprobs, token_logprobs
from nrl_models.losses import dpo_loss, misordered, ranking_loss, sequence_logprobs
from nrl_models.losses.named import NamedLoss, PreferenceLoss, RankingLoss
from nrl_models.recipes.rows import padded_rows
from nrl_models.recipes.weight_updates import clipped_update

Sequences = list[tuple[list[int], list[bool]]]
"""Sequences of a row: token ids, and a mask of the answer's tokens. A pair has two, the chosen one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLoop:
    """Performs the steps of supervised training.

    Args:
        model: The model to train.
        optimizer: Optimizer of the model's parameters.
        settings: Settings of the loss.
        pad: Token id of padding.
        micro_batch: Rows per forward.
        clip_gradient_norm: Maximum gradient norm.
        reference: Reference model of `dpo`.
        compute: Compute dtype. bfloat16 uses autocast.
        dropout: Whether log-probabilities and scores use dropout if the model is in training mode.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    settings: NamedLoss
    pad: int
    micro_batch: int = 1
    clip_gradient_norm: float = 1.0
    reference: Any = None
    compute: torch.dtype = torch.float32
    dropout: bool = False

    def step(self, rows: Iterator[Sequences], count: int) -> dict[str, float]:
        """Train on the next `count` rows. Returns the metrics in `SUPERVISED_METRICS` or `PAIR_METRICS`.

        An update whose gradient norm is NaN or infinite is skipped, and counted in `skipped_updates`.
        """
        with ExitStack() as stack:
            if not self.dropout:
                stack.enter_context(evaluating(self.model))
            if self.reference is not None:
                stack.enter_context(evaluating(self.reference))
            return self._step(rows, count)

    def _step(self, rows: Iterator[Sequences], count: int) -> dict[str, float]:
        batch = list(islice(rows, count))
        tokens = sum(len(ids) for row in batch for ids, _ in row)
        answers = sum(sum(answer[1:]) for row in batch for _, answer in row)
        self.optimizer.zero_grad()
        loss, scores = 0.0, []
        for start in range(0, count, self.micro_batch):
            part = batch[start : start + self.micro_batch]
            with autocast(self.model.device, self.compute):
                of_part, pair_scores = self._loss(part, len(part) / count, answers)
            of_part.backward()
            loss += of_part.item()
            scores.append(pair_scores)
        measured = {"loss": loss, "tokens": float(tokens)}
        measured |= clipped_update(self.model, self.optimizer, self.clip_gradient_norm)
        if isinstance(self.settings, (PreferenceLoss, RankingLoss)):
            chosen, rejected = torch.cat(scores, 1)
            measured["ordered"] = 1 - len(misordered(chosen, rejected)) / count
            measured["margin"] = (chosen - rejected).mean().item()
        return measured

    def _loss(self, part: Sequence[Sequences], share: float, answers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the share of some rows in a step's loss, and the scores of pairs `(2, pairs)`, chosen first.

        Args:
            part: The rows.
            share: Factor of the mean loss of pairs.
            answers: Number of answer tokens in the step, the divisor of the cross-entropy.
        """
        if not isinstance(self.settings, (PreferenceLoss, RankingLoss)):

            def cross_entropy(statistics: TokenLogprobs) -> torch.Tensor:
                return -statistics.logprobs.sum() / max(1, answers)

            statistics = self._found(self.model, [row[0] for row in part], cross_entropy)
            assert statistics.loss is not None
            return statistics.loss, statistics.logprobs.new_zeros(2, 0)
        sequences = [row[0] for row in part] + [row[1] for row in part]
        if isinstance(self.settings, RankingLoss):
            ids, there, _ = padded_rows(sequences, self.pad, self.model.device)
            scores = self.model(input_ids=ids, attention_mask=there.long(), use_cache=False).logits[:, 0].float()
            chosen, rejected = scores.chunk(2)
            loss = ranking_loss(chosen, rejected, margin=self.settings.margin)
        else:
            with torch.no_grad():
                theirs = self._found(self.reference, sequences)
            before, beta = sequence_logprobs(theirs.logprobs, theirs.mask), self.settings.beta

            def preference(statistics: TokenLogprobs) -> torch.Tensor:
                ours = sequence_logprobs(statistics.logprobs, statistics.mask).chunk(2)
                return dpo_loss(*ours, *before.chunk(2), beta=beta)

            pairs = torch.arange(len(part)).repeat(2)
            ours = self._found(self.model, sequences, preference, pairs)
            assert ours.loss is not None
            loss = ours.loss
            chosen, rejected = (sequence_logprobs(ours.logprobs, ours.mask) - before).chunk(2)
        return loss * share, torch.stack([chosen, rejected]).detach()

    def _found(
        self, model: Any, sequences: Sequences, loss: Any = None, terms: LossTerms | torch.Tensor = LossTerms.TOKEN
    ) -> TokenLogprobs:
        """Compute log-probabilities of answers, `(batch, seq_len)`, and their loss."""
        ids, there, answers = padded_rows(sequences, self.pad, model.device)
        return token_logprobs(model, ids, attention_mask=there, score=answers, loss=loss, loss_terms=terms)
