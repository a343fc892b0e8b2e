"""The verdict on a failing cell: the wrong side, the cause, and the first module that diverges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from nrl_models.common.checkpoint.json_reading import parsed
from nrl_models.common.value_checks import finite_or_none
from nrl_models.consistency.divergence import Divergence
from nrl_models.quirks import CATALOG, Evidence, VerdictKind


class Party(StrEnum):
    """Sides whose log-probabilities are compared with those of transformers in fp64."""

    TRAINER = "trainer"
    SECOND_TRAINER = "second trainer"
    DECODE = "engine decode"
    PREFILL = "engine prefill"
    REFERENCE = "transformers fp32"


class Deviation(NamedTuple):
    """Distance of a side from fp64: `token_mult_prob_error`, and the largest difference in nats."""

    token_mult_prob_error: float
    max: float


class Vote(StrEnum):
    """The side that a witness agrees with."""

    REFERENCE = "transformers"
    AT_FAULT = "the wrong side"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Opinion:
    """Result of a third implementation if engine and trainer differ.

    Args:
        engine: Name of the witness engine.
        vote: The side that it agrees with; None if it returned no log-probabilities.
        error: Reason why there are no log-probabilities.
        decodes: Whether the witness's decoding is also right; None if that was not checked.
    """

    engine: str
    vote: Vote | None
    error: str = ""
    decodes: bool | None = None

    def sentence(self, at_fault: str) -> str:
        """Describe the result in a sentence, given the sides `at_fault`."""
        if self.vote is None:
            return f"{self.engine}, used as a witness, returned no log-probabilities: {self.error}"
        if self.vote is Vote.AT_FAULT:
            return (
                f"{self.engine} agrees with {at_fault} and not with transformers, whose class may be wrong, or may "
                "compute something that these implementations omit"
            )
        return f"{self.engine} agrees with {self.vote}{', but differs in decoding' if self.decodes is False else ''}"


class Advice(StrEnum):
    """Change that makes an engine agree, as measured."""

    TRANSFORMERS_BACKEND = "serve with model_impl=transformers"
    """vLLM's own class is wrong. With transformers' class, vLLM is right in prefill and decoding."""


class CauseKind(StrEnum):
    """Kinds of bugs of a wrong side."""

    SAMPLING = "sampling"
    """Temperature, top-k or top-p."""
    ALIGNMENT = "alignment"
    """Log-probabilities belong to the previous or next token."""
    HEAD = "head"
    """The scale or soft cap of the logits."""
    STALE_WEIGHTS = "stale weights"
    STALE_CACHE = "stale cache"
    CONFIG = "config"
    """A key of the configuration."""


@dataclass(frozen=True, slots=True)
class VerdictCause:
    """The reason why a side is wrong.

    Args:
        kind: Kind of the cause.
        message: Description of the wrong computation, to follow "as if".
        key: Key of the configuration, for kind `CONFIG`.
    """

    kind: CauseKind
    message: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Source of a disagreement.

    Args:
        kind: The wrong side, or the explanation of the difference if no side is wrong.
        at_fault: The wrong sides.
        errors: Distance of each side from transformers in fp64.
        cause: The bug of the wrong side, if it was identified.
        divergence: The first module that diverges, if there is one.
        note: Further information: the precisions compared, or why no module is named.
        random_weights: Whether the engine was started on random weights.
        quirks: Names of the known quirks that match.
        witness: Result of the witness, if one was used.
        advice: An alternative to the wrong engine that was measured to be right; None if there is none.
    """

    kind: VerdictKind
    at_fault: tuple[Party, ...]
    errors: Mapping[Party, Deviation]
    cause: VerdictCause | None = None
    divergence: Divergence | None = None
    note: str = ""
    random_weights: bool = False
    quirks: tuple[str, ...] = ()
    witness: Opinion | None = None
    advice: Advice | None = None

    @property
    def evidence(self) -> Evidence:
        """Facts by which quirks are matched."""
        if self.divergence is None:
            return Evidence(self.kind, self.random_weights)
        divergence = self.divergence
        return Evidence(self.kind, self.random_weights, divergence.module, divergence.pattern, divergence.weights)

    @property
    def summary(self) -> str:
        """The verdict in a few sentences."""
        wrong_sides = " and ".join(self.at_fault)
        if self.kind == VerdictKind.PRECISION:
            sentences = ["The difference is explained by precision"]
        elif self.kind == VerdictKind.ROUNDING:
            sentences = ["The difference is explained by rounding: no side is farther from fp64 than expected"]
        elif self.kind == VerdictKind.UNSTABLE:
            sentences = ["The model is numerically unstable: transformers in fp32 is itself as far from fp64"]
        elif self.kind == VerdictKind.NOT_FINITE:
            sentences = [f"Log-probabilities of {wrong_sides} are not finite"]
        else:
            sentences = [f"Wrong: {wrong_sides}" + (f", computing as if {self.cause.message}" if self.cause else "")]
        sentences += [f"First divergence: {self.divergence}"] if self.divergence else []
        sentences += [self.note] if self.note else []
        sentences += [self.witness.sentence(wrong_sides)] if self.witness else []
        if self.advice is Advice.TRANSFORMERS_BACKEND:
            sentences.append('Advice: serve it with model_impl="transformers", by which vLLM is right here')
        sentences += [
            f"Known quirk: {quirk.name}: {quirk.symptom} {quirk.handling}"
            for quirk in CATALOG
            if quirk.name in self.quirks
        ]
        return " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values. Numbers that JSON lacks are None."""
        errors = {party: finite_or_none(error._asdict()) for party, error in self.errors.items()}
        return asdict(self) | {"errors": errors, "summary": self.summary}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Verdict:
        """Parse the output of `to_json`. Errors that are None become NaN."""
        errors = {
            party: {name: math.nan if value is None else value for name, value in error.items()}
            for party, error in content["errors"].items()
        }
        fields = {name: value for name, value in content.items() if name != "summary"}
        verdict: Verdict = parsed(cls, fields | {"errors": errors})
        return verdict
