"""The records of every phase of a release check, and grouping of findings by cause."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum, auto
from typing import Any


class Phase(StrEnum):
    """The phases of a release check, in order."""

    SIGNATURES = auto()
    SWEEP = auto()
    NUMBERS = auto()
    SUITE = auto()
    NEW = auto()
    TRIPWIRES = auto()
    REQUIREMENTS = auto()


class Kind(StrEnum):
    """Kinds of findings."""

    MISSING_NAME = auto()
    """A module that our code imports from lacks a name."""
    RENAMED_PARAMETER = auto()
    """An override of ours names a parameter that upstream's function no longer has."""
    MOVED_PARAMETER = auto()
    """An override of ours takes a parameter at another position than upstream's function."""
    CHANGED_CALL = auto()
    """Our code calls an upstream function with arguments that it no longer takes, or takes for other parameters."""
    MISSING_FIELD = auto()
    """Our code constructs an output class with a field that it no longer has."""
    SWALLOWED_KEYWORD = auto()
    """Our code passes a keyword that a class takes under its new name only, and drops without an error."""
    EXCEPTION = auto()
    DIFFERENCE = auto()
    """Results differ from the reference."""
    CHANGED_NUMBERS = auto()
    """Results of transformers' own class differ from those recorded with the tested version."""
    CHANGED_CLASSES = auto()
    """Classes of transformers are new or removed."""
    EXPIRED_QUIRK = auto()
    """A quirk that the catalog lists is gone, or is back."""
    CONFLICT = auto()
    """Packages that cannot be installed or used together."""
    NOT_ONBOARDED = auto()
    """A new model that `nrl-models new` does not make a passing family of."""
    NOT_SERVED = auto()
    """A model type that transformers loads and nrl_models does not."""


STATIC = frozenset(
    {Kind.MISSING_NAME, Kind.RENAMED_PARAMETER, Kind.MOVED_PARAMETER, Kind.CHANGED_CALL, Kind.MISSING_FIELD}
)
"""Kinds found by reading signatures. Differences in results that follow from them belong to the same cause."""


@dataclass(frozen=True)
class Finding:
    """One change in a new release.

    Args:
        phase: The phase that found it.
        kind: Its kind.
        subject: The likely source: a function, class, name, package or module, as `module:qualname`.
        detail: The parameter, the field, the exception's type or the check that differs.
        functions: Upstream functions that are involved, as `module:qualname`.
        architectures: Affected architectures.
        item: An identifier of the check, unique within the phase.
        message: A one-line description.
    """

    phase: Phase
    kind: Kind
    subject: str
    detail: str
    functions: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    item: str = ""
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a line of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """Read a line of JSON."""
        return cls(
            Phase(values["phase"]),
            Kind(values["kind"]),
            values["subject"],
            values["detail"],
            tuple(values["functions"]),
            tuple(values["architectures"]),
            values["item"],
            values["message"],
        )


@dataclass
class Cause:
    """Findings with the same cause.

    Args:
        kind: Kind of the finding that names the cause.
        subject: Its subject.
        detail: Its detail.
        findings: All findings.
    """

    kind: Kind
    subject: str
    detail: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def id(self) -> str:
        """A short name that is stable across runs."""
        text = "\0".join((self.kind, self.subject, self.detail))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def architectures(self) -> tuple[str, ...]:
        """Affected architectures, sorted by name."""
        return tuple(sorted({name for finding in self.findings for name in finding.architectures}))

    @property
    def functions(self) -> tuple[str, ...]:
        """Involved upstream functions, in the order in which they were found."""
        return tuple(dict.fromkeys(name for finding in self.findings for name in finding.functions))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that found it, in order."""
        return tuple(phase for phase in Phase if any(finding.phase is phase for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Return its content in a report."""
        return {
            "id": self.id,
            "kind": self.kind,
            "subject": self.subject,
            "detail": self.detail,
            "architectures": self.architectures,
            "functions": self.functions,
            "findings": [finding.to_json() for finding in self.findings],
        }


def causes_of(findings: Iterable[Finding]) -> list[Cause]:
    """Group findings by cause, the largest group first.

    A finding about results joins the cause of a static finding if both name the same function of upstream. A
    difference names no function; it joins if its architecture has a single static cause. Other findings are grouped by
    kind, subject and detail.
    """
    findings = list(findings)
    causes: dict[tuple[str, str, str], Cause] = {}

    def add(finding: Finding, like: Finding) -> None:
        key = like.kind, like.subject, like.detail
        causes.setdefault(key, Cause(like.kind, like.subject, like.detail)).findings.append(finding)

    static = [finding for finding in findings if finding.kind in STATIC]
    by_function = {name: finding for finding in reversed(static) for name in (finding.subject, *finding.functions)}
    for finding in findings:
        if finding.kind in STATIC:
            add(finding, finding)
            continue
        functions = (by_function[name] for name in (finding.subject, *finding.functions) if name in by_function)
        add(finding, next(functions, None) or _only_static_cause(finding, static) or finding)
    return sorted(causes.values(), key=lambda cause: (-len(cause.architectures), cause.kind, cause.subject))


def _only_static_cause(finding: Finding, static: Iterable[Finding]) -> Finding | None:
    if finding.kind not in (Kind.DIFFERENCE, Kind.EXCEPTION):
        return None
    shared = [other for other in static if set(finding.architectures) & set(other.architectures)]
    subjects = {(other.kind, other.subject, other.detail) for other in shared}
    return shared[0] if len(subjects) == 1 else None
