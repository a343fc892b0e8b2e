"""The way to the catalogue of quirks: what was observed goes in, quirks that match come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nrl_models.quirks import CATALOGUE, Subject


@dataclass(frozen=True, slots=True)
class Observation:
    """What a verdict knows about a disagreement.

    Args:
        model: the trainer's model.
        odd: who is wrong: `trainer`, `engine decode`, `engine prefill`.
        kind: what it comes from, see `Verdict.kind`.
        module: the first module that parts, or an empty string.
        detail: what is known about where it parts, in words, or an empty string.
        cause: what the odd one does instead, in words, or an empty string.
        engine: what the engine says of itself (`Engine.describe()`).
        load_format: how the engine was started: `auto` or `dummy`.
    """

    model: Any
    odd: tuple[str, ...]
    kind: str
    module: str
    detail: str
    cause: str
    engine: dict[str, Any]
    load_format: str


QuirkFinder = Callable[[Observation], Sequence[str]]
"""Gives, for each known quirk that matches, a line to show: its name and what to do."""


def known_quirks(observation: Observation) -> Sequence[str]:
    """The quirks of the catalogue that concern the model and may be what was observed."""
    subject = Subject(observation.model)
    return [
        f"{quirk.name}: {quirk.symptom} {quirk.handling}"
        for quirk in CATALOGUE
        if quirk.explains is not None and quirk.explains(observation) and quirk.applies(subject)
    ]
