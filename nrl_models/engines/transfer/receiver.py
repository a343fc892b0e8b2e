"""The engine's side of an update: it is applied completely or not at all; otherwise the engine raises on every call.

An update is read and verified before the model is modified. If the trainer dies before that, the engine continues with
its current version. Applying the update needs nothing from the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch

from nrl_models.engines.transfer.updates import Update, Weights, made_of
from nrl_models.errors import EngineError, MixedWeightsError, one_line

Apply = Callable[[Mapping[str, torch.Tensor], Set[str]], None]
"""Function that loads weights into a model, given all weights and the names of changed ones. It raises
`MixedWeightsError` if only some were loaded, and any other error if the model did not change."""


class Receiver:
    """Receives updates for one model.

    Args:
        apply: Loads weights into the model.
        refuse: Makes the model raise an error with this message on each call; None stops that.

    Attributes:
        keep: Whether to keep the weights by hub name, which deltas need. They share memory with the trainer until they
            change.
        weights: The last applied version; None before the first.
        mixed: Whether the model has parts of two versions.
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
        """Read and verify an update. Does not modify the model.

        Raises:
            EngineError: See `made_of`. Also if an update is already staged.
        """
        if self._staged is not None:
            self._staged = None
            raise EngineError("an update of all weights came twice before it was finished: both are dropped")
        self._staged = made_of(update, self.weights)

    def finish(self) -> None:
        """Apply the staged update, if there is one.

        Raises:
            MixedWeightsError: If only some of the weights were applied. The engine then raises this error on every
                call until an update of all weights succeeds.
            EngineError: If nothing was applied. The engine keeps its previous version.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            return
        weights, changed = staged
        try:
            # With weights of two versions, tensors without changes may also be missing.
            self._apply(weights.tensors, weights.tensors.keys() if self.mixed else changed)
        except MixedWeightsError as error:
            message = (
                f"the engine has parts of version {self.version} of the weights and parts of version "
                f"{weights.version!r}: {error}. It raises on every call until an update of all weights succeeds"
            )
            self.mixed = True
            self._refuse(message)
            raise MixedWeightsError(message) from error
        except Exception as error:
            raise EngineError(
                f"version {weights.version!r} of the weights could not be applied, and the engine keeps version "
                f"{self.version}: {one_line(error)}"
            ) from error
        if self.mixed:
            self._refuse(None)
            self.mixed = False
        self.weights = weights if self.keep else weights.without_tensors()
