"""What a consistency check observed of a disagreement: the facts that quirks' `explains` predicates ask about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VerdictKind(StrEnum):
    """Which side is at fault; or, if no side is, what explains the difference."""

    TRAINER = "trainer"
    SECOND_TRAINER = "second trainer"
    ENGINE = "engine"
    """Decoding and prefill are both wrong."""
    ENGINE_DECODE = "engine decode"
    ENGINE_PREFILL = "engine prefill"
    BOTH = "both"
    """Trainer and engine are both wrong."""
    PRECISION = "precision"
    """Each side is as close to fp64 as its dtype allows."""
    UNSTABLE = "unstable"
    """transformers in fp32 is itself far from fp64."""
    NOT_FINITE = "not finite"
    """Some log-probabilities are NaN or infinite."""

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer is at fault."""
        return self in (VerdictKind.TRAINER, VerdictKind.BOTH)


class Pattern(StrEnum):
    """How a module's wrong tensor relates to the expected one."""

    UNKNOWN = "unknown"
    SCALED = "scaled"
    HALVES_SWAPPED = "halves swapped"
    SIGN_FLIPPED = "sign flipped"
    STALE_WEIGHTS = "stale weights"
    """It is the output of the weights before the last refit."""
    UNFINISHED_LOGITS = "unfinished logits"
    """They lack the scale or soft cap that follows the output embedding."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a disagreement.

    Args:
        kind: which side is at fault.
        random_weights: whether the engine was started on random weights.
        module: the first module that diverges, by its name in transformers, or `logits`; empty if none was found.
        pattern: how that module's tensor relates to the expected one.
        weights: names of the module's weights that differ from the checkpoint's.
    """

    kind: VerdictKind
    random_weights: bool = False
    module: str = ""
    pattern: Pattern = Pattern.UNKNOWN
    weights: tuple[str, ...] = ()
