"""Facts of a disagreement that a consistency check observed, for the `explains` predicates of quirks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VerdictKind(StrEnum):
    """The wrong side, or the explanation of the difference if no side is wrong."""

    TRAINER = "trainer"
    SECOND_TRAINER = "second trainer"
    ENGINE = "engine"
    """Decoding and prefill are both wrong."""
    ENGINE_DECODE = "engine decode"
    ENGINE_PREFILL = "engine prefill"
    BOTH = "both"
    """Trainer and engine are both wrong."""
    PRECISION = "precision"
    """Each side is as close to fp64 as its dtype allows. The dtypes differ, are fp32, or are not reported."""
    ROUNDING = "rounding"
    """All sides compute in one dtype below fp32, and each is about as close to fp64 as transformers in that dtype."""
    UNSTABLE = "unstable"
    """transformers in fp32 is itself far from fp64."""
    NOT_FINITE = "not finite"
    """Some log-probabilities are NaN or infinite."""

    @property
    def is_trainers(self) -> bool:
        """Return True if the trainer is wrong."""
        return self in (VerdictKind.TRAINER, VerdictKind.BOTH)


class Pattern(StrEnum):
    """Relation of a module's wrong tensor to the expected one."""

    UNKNOWN = "unknown"
    SCALED = "scaled"
    HALVES_SWAPPED = "halves swapped"
    SIGN_FLIPPED = "sign flipped"
    STALE_WEIGHTS = "stale weights"
    """Output of the weights before the last refit."""
    UNFINISHED_LOGITS = "unfinished logits"
    """Logits without the scale or soft cap that follows the output embedding."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts about a disagreement.

    Args:
        kind: The wrong side.
        random_weights: Whether the engine was started on random weights.
        module: The first module that diverges, by its name in transformers, or `logits`; empty if none was found.
        pattern: Relation of that module's tensor to the expected one.
        weights: Names of the module's weights that differ from the checkpoint's.
    """

    kind: VerdictKind
    random_weights: bool = False
    module: str = ""
    pattern: Pattern = Pattern.UNKNOWN
    weights: tuple[str, ...] = ()
