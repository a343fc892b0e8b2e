"""The narrow way to the quirk catalogue: what was observed goes in, quirks that match come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Observation:
    """What a verdict knows about a disagreement.

    Args:
        config: the model's configuration.
        odd: who is wrong: `trainer`, `engine decode`, `engine prefill`.
        kind: what it comes from, see `Verdict.kind`.
        module: the first module that parts, or an empty string.
        cause: what the odd one does instead, in words, or an empty string.
        engine: what the engine says of itself (`Engine.describe()`).
        load_format: how the engine was started: `auto` or `dummy`.
    """

    config: Any
    odd: tuple[str, ...]
    kind: str
    module: str
    cause: str
    engine: dict[str, Any]
    load_format: str


QuirkFinder = Callable[[Observation], Sequence[str]]
"""Gives, for each known quirk that matches, a line to show: its name and what to do."""


def no_quirks(observation: Observation) -> Sequence[str]:
    """Where there is no catalogue."""
    return ()
