"""Measurements by name: taken once in a live check, read from a capsule in a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nrl_models.consistency.capsule.module_comparison import ModuleComparison
from nrl_models.errors import CapsuleError, NRLModelsError

FAILED = "failed: "
"""Beginning of the names of values that explain why modules could not be compared."""


@dataclass
class Observations:
    """Measurements that a verdict is derived from.

    Rules read every measurement by name. In a live check, the first read takes the measurement and records it. In a
    replay, all measurements are already recorded. So both compute a verdict with the same code.

    Args:
        tensors: Recorded tensors by name.
        values: Recorded JSON values by name.
        comparisons: Recorded comparisons of modules by name.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    comparisons: dict[str, ModuleComparison] = field(default_factory=dict)

    def tensor(self, name: str, measure: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a recorded tensor, or measure and record it."""
        if name not in self.tensors:
            self.tensors[name] = measure()
        return self.tensors[name]

    def optional(self, name: str, measure: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Return a recorded tensor, or measure and record it. None if it does not exist."""
        if name not in self.tensors and name not in self.values:
            if (measured := measure()) is None:
                self.values[name] = None
            else:
                self.tensors[name] = measured
        return self.tensors.get(name)

    def value(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a recorded JSON value, or measure and record it."""
        if name not in self.values:
            self.values[name] = measure()
        return self.values[name]

    def comparison(self, name: str, measure: Callable[[], ModuleComparison]) -> ModuleComparison | str:
        """Return a recorded comparison of modules, or compare and record it. A string says why that is impossible."""
        if name not in self.comparisons:
            if (failure := self.values.get(FAILED + name)) is not None:
                return str(failure)
            try:
                self.comparisons[name] = measure()
            except CapsuleError:
                raise
            except NRLModelsError as error:
                self.values[FAILED + name] = str(error)
                return str(error)
        return self.comparisons[name]
