"""Changes of a trainer's learning rate and tokenizer between weight syncs."""

from __future__ import annotations

import math
from typing import Any

import torch

from nrl_models.errors import UnknownArgumentError, shown, shown_or_type
from nrl_models.watch.rollout_tensors import fingerprint


class TrainerChanges:
    """Notes the learning rates of optimizer steps, and compares the tokenizer with its last state.

    Args:
        optimizer: The trainer's optimizer, if known.
        tokenizer: The trainer's tokenizer, if known.

    Raises:
        UnknownArgumentError: The tokenizer has no vocabulary, or see `follow`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, tokenizer: Any) -> None:
        if tokenizer is not None and (isinstance(tokenizer, type) or not hasattr(tokenizer, "get_vocab")):
            kind = shown_or_type(tokenizer)
            advice = "pass processor.tokenizer" if hasattr(tokenizer, "tokenizer") else "pass the tokenizer itself"
            raise UnknownArgumentError(f"tokenizer is {kind}, expected a tokenizer of transformers: {advice}")
        self._tokenizer = tokenizer
        self._learning_rate: float | None = None
        self._vocabulary = fingerprint(tokenizer)
        if optimizer is not None:
            self.follow(optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the learning rate of each step of an optimizer.

        Args:
            optimizer: An optimizer of PyTorch, or a wrapper of accelerate or DeepSpeed with the attribute `optimizer`.

        Raises:
            UnknownArgumentError: `optimizer` is another object.
        """
        inner: Any = optimizer
        while (wrapped := getattr(inner, "optimizer", None)) is not None:
            inner = wrapped
        if not isinstance(inner, torch.optim.Optimizer):
            raise UnknownArgumentError(f"optimizer={shown(optimizer)}: expected a torch.optim.Optimizer")
        inner.register_step_pre_hook(self._note_learning_rate)

    def _note_learning_rate(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates = (group.get("lr") for group in optimizer.param_groups)
        # Adafactor without a learning rate computes its own.
        self._learning_rate = max(
            self._learning_rate or 0.0, *(math.inf if rate is None else float(rate) for rate in rates)
        )

    def take_learning_rate(self) -> float | None:
        """Return the largest learning rate of the steps since the last call; None without steps or if it is unknown."""
        rate, self._learning_rate = self._learning_rate, None
        return None if rate == math.inf else rate

    def of_tokenizer(self) -> list[str]:
        """Return the parts of the tokenizer that changed since the last call."""
        now, before = fingerprint(self._tokenizer), self._vocabulary
        self._vocabulary = now
        return [name for name, value in now.items() if before.get(name) != value]
