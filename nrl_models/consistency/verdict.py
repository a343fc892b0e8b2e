"""The verdict on a cell that fails: which side is at fault, why, and in which module it first diverges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from nrl_models.consistency.divergence import Divergence
from nrl_models.logprobs.metrics import finite_or_none
from nrl_models.quirks import CATALOGUE, Evidence, Pattern, VerdictKind


class Party(StrEnum):
    """Whose log-probabilities are compared with those of transformers in fp64."""

    TRAINER = "trainer"
    SECOND_TRAINER = "second trainer"
    DECODE = "engine decode"
    PREFILL = "engine prefill"
    REFERENCE = "transformers fp32"


class Deviation(NamedTuple):
    """How far a party is from fp64: its `token_mult_prob_error`, and the largest difference in nats."""

    token_mult_prob_error: float
    max: float


class Vote(StrEnum):
    """Whom a witness agrees with."""

    REFERENCE = "transformers"
    AT_FAULT = "the party at fault"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a third implementation computes where an engine and a trainer differ.

    Args:
        engine: its name.
        vote: whom it agrees with; None if it gave no log-probabilities.
        error: why it gave none.
        decodes: whether it also decodes right; None if that was not looked at.
    """

    engine: str
    vote: Vote | None
    error: str = ""
    decodes: bool | None = None

    def sentence(self, at_fault: str) -> str:
        """It in a sentence, about the parties `at_fault`."""
        if self.vote is None:
            return f"{self.engine}, asked as a witness, gave no log-probabilities: {self.error}"
        if self.vote is Vote.AT_FAULT:
            return (
                f"{self.engine} agrees with {at_fault} and not with transformers, whose class may be what is wrong, or "
                "may compute what these implementations leave out"
            )
        return f"{self.engine} agrees with {self.vote}{', but decodes otherwise' if self.decodes is False else ''}"


class Advice(StrEnum):
    """What would mend an engine, as measured."""

    TRANSFORMERS_BACKEND = "serve with model_impl=transformers"
    """vLLM's own class is wrong; with transformers' in its place vLLM is right, in one prefill and in decoding."""


class CauseKind(StrEnum):
    """What a party at fault does differently."""

    SAMPLING = "sampling"
    """Temperature, top-k or top-p."""
    ALIGNMENT = "alignment"
    """Log-probabilities belong to a neighbouring token."""
    HEAD = "head"
    """The scale or soft cap of the logits."""
    STALE_WEIGHTS = "stale weights"
    STALE_CACHE = "stale cache"
    CONFIG = "config"
    """A key of the configuration."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a party is wrong.

    Args:
        kind: the kind of cause.
        message: what it computes instead, to follow "as if".
        key: the key of the configuration, of kind `CONFIG`.
    """

    kind: CauseKind
    message: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a disagreement comes from.

    Args:
        kind: which side is at fault; or, if no side is, what explains the difference.
        at_fault: the parties at fault.
        errors: how far each party is from transformers in fp64.
        cause: what the party at fault computes instead, if that was found.
        divergence: the first module that diverges, if one was found.
        note: what else is known: the precisions compared, or why no module is named.
        random_weights: whether the engine was started on random weights.
        quirks: names of the known quirks that match.
        witness: what another engine says, where it was asked.
        advice: what was measured to be right in place of the engine at fault; None if nothing was.
    """

    kind: VerdictKind
    at_fault: tuple[Party, ...]
    errors: Mapping[Party, Deviation]
    cause: Cause | None = None
    divergence: Divergence | None = None
    note: str = ""
    random_weights: bool = False
    quirks: tuple[str, ...] = ()
    witness: Opinion | None = None
    advice: Advice | None = None

    @property
    def evidence(self) -> Evidence:
        """The facts that quirks are matched with."""
        if self.divergence is None:
            return Evidence(self.kind, self.random_weights)
        found = self.divergence
        return Evidence(self.kind, self.random_weights, found.module, found.pattern, found.weights)

    @property
    def summary(self) -> str:
        """All of it in a few sentences."""
        who = " and ".join(self.at_fault)
        if self.kind == VerdictKind.PRECISION:
            sentences = ["The difference is explained by precision"]
        elif self.kind == VerdictKind.UNSTABLE:
            sentences = ["The model is numerically unstable: transformers in fp32 is itself as far from fp64"]
        elif self.kind == VerdictKind.NOT_FINITE:
            sentences = [f"Log-probabilities of {who} are not finite"]
        else:
            sentences = [f"At fault: {who}" + (f", computing as if {self.cause.message}" if self.cause else "")]
        sentences += [f"First divergence: {self.divergence}"] if self.divergence else []
        sentences += [self.note] if self.note else []
        sentences += [self.witness.sentence(who)] if self.witness else []
        if self.advice is Advice.TRANSFORMERS_BACKEND:
            sentences.append('Advice: serve it with model_impl="transformers", by which vLLM is right here')
        sentences += [
            f"Known quirk: {quirk.name}: {quirk.symptom} {quirk.handling}"
            for quirk in CATALOGUE
            if quirk.name in self.quirks
        ]
        return " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences)

    def to_json(self) -> dict[str, Any]:
        """By name, with numbers that JSON lacks as None."""
        errors = {
            party: {name: finite_or_none(value) for name, value in error._asdict().items()}
            for party, error in self.errors.items()
        }
        return asdict(self) | {"errors": errors, "summary": self.summary}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Verdict:
        """Read what `to_json` gave."""
        fields = {name: value for name, value in content.items() if name != "summary"}
        if fields["cause"] is not None:
            fields["cause"] = Cause(**fields["cause"] | {"kind": CauseKind(fields["cause"]["kind"])})
        if (said := fields.get("witness")) is not None:
            fields["witness"] = Opinion(**said | {"vote": said["vote"] and Vote(said["vote"])})
        if (advice := fields.get("advice")) is not None:
            fields["advice"] = Advice(advice)
        if (found := fields["divergence"]) is not None:
            typed = {"pattern": Pattern(found["pattern"]), "weights": tuple(found["weights"])}
            fields["divergence"] = Divergence(**found | typed)
        return cls(
            **fields
            | {
                "kind": VerdictKind(fields["kind"]),
                "at_fault": tuple(map(Party, fields["at_fault"])),
                "errors": {Party(party): Deviation(**error) for party, error in fields["errors"].items()},
                "quirks": tuple(fields["quirks"]),
            }
        )
