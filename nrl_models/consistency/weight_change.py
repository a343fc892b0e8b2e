"""Change the weights of a trainer between two refits, so that stale tensors in the engine are detected.

A training step changes every element of every floating-point tensor, including buffers. A tensor that did not arrive is
detected in two ways:

- The engine's weight did not change, if the engine's weights can be read.
- Log-probabilities differ by more than a bound, which is derived from the first refit's error and the noise floor. So
  the step is large enough that restoring any single tensor changes the trainer's log-probabilities by more than the
  bound.

Weights of multi-token prediction also change. Log-probabilities do not depend on them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from nrl_models.common.state_dict.kept_tensors import keep, kept_by
from nrl_models.common.state_dict.mtp import MTP_COPIES
from nrl_models.consistency.cells import Cell
from nrl_models.consistency.measure import Measurement, Meter
from nrl_models.engines.scores import final_scores
from nrl_models.family import FamilyModel
from nrl_models.logprobs.metrics import token_mult_prob_error

LEARNING_RATE = 1e-2
"""Learning rate of the training step between two refits. Large, so that stale weights have an effect."""

MIN_CHANGE = 1.01
"""Minimum `token_mult_prob_error` between before and after the step. A smaller change would not detect anything."""

RELATIVE_MOVE = 2.0**-6
"""Minimum change of an element relative to its size. Smaller steps could be lost if the engine rounds to bf16."""

MARGIN = 4.0
"""Minimum ratio of the error of a stale tensor to the bound, both as distances from 1, so that it is detected."""

LARGER_MOVES = (1.0, 8.0, 64.0)
"""Factors on a tensor's step. They are tried in order until a stale tensor would be detected."""

FINITE_BOUND = 2.0**14
"""Replaces infinite elements, which no step moves: disabled bounds of activations (`input_min` of Gemma 4)."""

OBSERVING_SECONDS = 60.0
"""Time limit for measuring the effect of stale tensors, with one forward pass each. Further tensors are listed."""


class WeightChange:
    """A training step of the trainer, and the weights before it.

    Args:
        meter: Has the engine and the trainer.
        cell: The cell of the comparison.

    Attributes:
        old: The trainer's weights before the step, by name. Empty before `train`.
    """

    def __init__(self, meter: Meter, cell: Cell) -> None:
        self.meter, self.cell = meter, cell
        self.old: dict[str, torch.Tensor] = {}
        self._is_readable = False

    def train(self, bound: float) -> float:
        """Train a step on new prompts; returns how far it moves the trainer (`token_mult_prob_error`).

        Every element of every floating-point tensor moves, see the module's docstring.

        Args:
            bound: Bound on the `token_mult_prob_error` of the next refit.
        """
        trainer, settings = self.meter.trainer, self.meter.settings
        model, tokens = trainer.model, self.meter.prompts.make(self.cell, self.cell.length, settings.seed + 7)
        before = self.meter.measure(self.cell)
        generated, sampling = before.decode.shape[1], settings.sampling_of(self.cell)
        self._is_readable = self.meter.engine.note_weights()
        weights = _weights(model)
        old = {name: tensor.clone() for name, tensor in weights.items()}

        def scores() -> torch.Tensor:
            return final_scores(trainer, before.tokens, generated, sampling)

        for _ in range(5):
            batch = torch.tensor(tokens, device=model.device)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        size = parameter.float().std().nan_to_num().clamp(min=1e-3)
                        parameter.add_(parameter.grad.sign() * size.to(parameter.dtype), alpha=-LEARNING_RATE)
                        parameter.grad = None
            moved = _error(scores(), before.trainer)
            if moved >= MIN_CHANGE:
                break
        _move_all(weights, old, settings.seed)
        self._enlarge(weights, old, scores, 1.0 + MARGIN * (bound - 1.0))
        _move_kept(model, weights, old, settings.seed)
        self.old = old
        return moved

    @torch.no_grad()
    def _enlarge(
        self,
        weights: Mapping[str, torch.Tensor],
        old: Mapping[str, torch.Tensor],
        scores: Callable[[], torch.Tensor],
        needed: float,
    ) -> None:
        """Enlarge the steps of tensors that could be stale without detection. A step is kept if no larger one helps."""
        started, now = time.monotonic(), scores()
        for name, tensor in weights.items():
            if old[name].isinf().any():
                continue  # infinite steps cannot be scaled
            new, current = tensor.clone(), now
            for factor in LARGER_MOVES:
                if time.monotonic() - started > OBSERVING_SECONDS:
                    return
                if factor > 1.0:
                    tensor.copy_(old[name] + factor * (new - old[name]))
                    now = scores()
                if self._effect(tensor, old[name], now, scores) > needed:
                    break
            else:
                tensor.copy_(new)
                now = current

    @torch.no_grad()
    def unseen(self, after: Measurement, bound: float) -> Iterable[str]:
        """Yield tensors that could be stale without an effect above `bound` on the compared tokens."""
        model, old = self.meter.trainer.model, self.old
        plan, mtp_weights = model.state_dict_adapter.export_plan(), model.state_dict_adapter.mtp
        yield from (name for name, _, dtype in plan if name in mtp_weights or not dtype.is_floating_point)
        if self._is_readable or not old:
            return
        needed, started = 1.0 + 2.0 * (bound - 1.0), time.monotonic()
        generated, sampling = after.decode.shape[1], self.meter.settings.sampling_of(self.cell)

        def scores() -> torch.Tensor:
            return final_scores(self.meter.trainer, after.tokens, generated, sampling)

        for name, tensor in _weights(model).items():
            is_late = time.monotonic() - started > OBSERVING_SECONDS
            if is_late or not self._effect(tensor, old[name], after.trainer, scores) > needed:
                yield name

    @staticmethod
    def _effect(
        tensor: torch.Tensor, old: torch.Tensor, now: torch.Tensor, scores: Callable[[], torch.Tensor]
    ) -> float:
        """Return `token_mult_prob_error` of the trainer if one tensor has its old values."""
        new = tensor.clone()
        tensor.copy_(old)
        effect = _error(scores(), now)
        tensor.copy_(new)
        return effect


def _weights(model: FamilyModel) -> dict[str, torch.Tensor]:
    """Return the model's floating-point tensors by hub name, including buffers. Writing to them changes the model.

    If a hub tensor is not a view, its parameters are included instead, by parameter name.
    """
    adapter = model.state_dict_adapter
    views = adapter.hf_views(model)
    computed = [tensor for name, tensor in adapter.exported("hub").items() if name not in views]
    rest = {name for tensor in computed for name in tensor.parameters if name not in adapter.tied}
    state_dict = model.state_dict()
    tensors = views | {name: state_dict[name].detach() for name in sorted(rest)}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


@torch.no_grad()
def _move_all(weights: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor], seed: int) -> None:
    """Change every element by at least `RELATIVE_MOVE` of its size, including elements without a gradient.

    Infinite elements become finite, but stay large.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        before = old[name].float()
        step = tensor.float() - before
        size = before.std(correction=0).nan_to_num().clamp(min=1e-3) * LEARNING_RATE
        random = torch.rand(tensor.shape, generator=generator).to(tensor.device) - 0.5
        least = torch.maximum(before.abs() * RELATIVE_MOVE, size)
        moved = before + torch.where(step == 0, random, step).sign() * torch.maximum(step.abs(), least)
        tensor.copy_(torch.where(before.isinf(), before.sign() * FINITE_BOUND, moved))


@torch.no_grad()
def _move_kept(
    model: FamilyModel, weights: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor], seed: int
) -> None:
    """Change the MTP weights that a model keeps. Copies of the model's embeddings stay equal to them."""
    moved = {}
    for name, tensor in kept_by(model, mtp_only=True).items():
        before = tensor.read()
        if not tensor.spec.dtype.is_floating_point:
            continue
        originals = old if name.endswith(MTP_COPIES) else ()
        original = next((other for other in originals if torch.equal(old[other].cpu(), before)), None)
        new = before.clone() if original is None else weights[original].to("cpu", before.dtype, copy=True)
        if original is None:
            _move_all({name: new}, {name: before}, seed)
        moved[name] = replace(tensor, stored=(new,), compute=None)
    keep(model, moved)


def _error(scores: torch.Tensor, others: torch.Tensor) -> float:
    """Return `token_mult_prob_error`; infinite if only one side is not finite."""
    same = scores.isfinite() & others.isfinite()
    return token_mult_prob_error(scores, others, same) if same.any() else math.inf
