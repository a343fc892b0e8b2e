"""The engine's side of an update: it takes effect whole, or not at all, or the engine answers nothing.

An update is read and checked before anything of the model is touched: until then the trainer may die at any step, and
the engine goes on with the version it has. Applying it needs nothing of the trainer any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch

from nrl_models.engines.transfer.updates import Update, Weights, made_of
from nrl_models.errors import EngineError, MixedWeightsError, one_line

Apply = Callable[[Mapping[str, torch.Tensor], Set[str]], None]
"""Loads weights into a model, given all of them and the names of those that changed. Raises a MixedWeightsError if the
model is left with some of them, and anything else if it is as it was."""


class Receiver:
    """Takes updates for one model.

    Args:
        apply: loads weights into the model.
        refuse: has the model answer nothing, with this message; None ends that.

    Attributes:
        keep: whether to keep the weights by hub name (in memory that is shared with the trainer, until they change),
            which deltas need.
        weights: the last version that took effect; None before the first.
        mixed: whether the model has parts of two versions.
    """

    def __init__(self, apply: Apply, refuse: Callable[[str | None], None]) -> None:
        self.weights: Weights | None = None
        self.mixed = False
        self.keep = True
        self._apply, self._refuse = apply, refuse
        self._staged: tuple[Weights, Set[str]] | None = None

    @property
    def version(self) -> str:
        """The name of the version that it has."""
        return "it was started with" if self.weights is None else repr(self.weights.version)

    def start(self) -> None:
        """Begin an update; one that was not finished is dropped."""
        self._staged = None

    def stage(self, update: Update) -> None:
        """Read and check an update. The model stays as it is.

        Raises:
            EngineError: see `made_of`; or there is an update already.
        """
        if self._staged is not None:
            self._staged = None
            raise EngineError("an update of all weights came twice before it was finished: both are dropped")
        self._staged = made_of(update, self.weights)

    def finish(self) -> None:
        """Have what was staged take effect; without anything staged, nothing happens.

        Raises:
            MixedWeightsError: the model took some of it. It answers nothing until another update, of all weights, takes
                effect.
            EngineError: the model took none of it, and has the version of before.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            return
        weights, changed = staged
        try:
            # Where parts of two versions are, what did not change may be missing, too.
            self._apply(weights.tensors, weights.tensors.keys() if self.mixed else changed)
        except MixedWeightsError as error:
            message = (
                f"the engine has parts of version {self.version} of the weights and parts of version "
                f"{weights.version!r}: {error}. It answers nothing until an update of all weights succeeds"
            )
            self.mixed = True
            self._refuse(message)
            raise MixedWeightsError(message) from error
        except Exception as error:
            raise EngineError(
                f"version {weights.version!r} of the weights was refused, and the engine has version {self.version} as "
                f"before: {one_line(error)}"
            ) from error
        if self.mixed:
            self._refuse(None)
            self.mixed = False
        self.weights = weights if self.keep else weights.without_tensors()
