"""Changes of a trainer's learning rate and tokenizer between weight syncs."""

from __future__ import annotations

from typing import Any

import torch

from nrl_models.watch.rollout_tensors import fingerprint


class TrainerChanges:
    """Notes the learning rates of steps, and compares the tokenizer with its last state.

    Args:
        optimizer: The trainer's optimizer, if known.
        tokenizer: The trainer's tokenizer, if known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, tokenizer: Any) -> None:
        self._optimizer, self._tokenizer = optimizer, tokenizer
        self._learning_rate: float | None = None
        self._vocabulary = fingerprint(tokenizer)

    def note_learning_rate(self) -> None:
        """Note the learning rate of a step."""
        if self._optimizer is not None:
            rate = max(float(group["lr"]) for group in self._optimizer.param_groups)
            self._learning_rate = max(rate, self._learning_rate or 0.0)

    def take_learning_rate(self) -> float | None:
        """Return the largest learning rate since the last call; None without steps or optimizer."""
        rate, self._learning_rate = self._learning_rate, None
        return rate

    def of_tokenizer(self) -> list[str]:
        """Return the parts of the tokenizer that changed since the last call."""
        now, before = fingerprint(self._tokenizer), self._vocabulary
        self._vocabulary = now
        return [name for name, value in now.items() if before.get(name) != value]
