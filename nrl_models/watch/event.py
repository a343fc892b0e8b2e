"""Derive the findings of an event (a weight sync or a step) from its tensors, digests and measurements.

A watch and a replay of its capsule both call `Event.findings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from nrl_models.common.checkpoint.json_reading import parsed
from nrl_models.logprobs.metrics import shown_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.watch.diagnosis import DriftEvidence, diagnose_probes, diagnose_step, with_level
from nrl_models.watch.finding import Cause, Finding, Severity
from nrl_models.watch.rollout_tensors import uncompared
from nrl_models.watch.step_metrics import Bars, StepMetrics
from nrl_models.watch.syncs import Sync, Transfer


class EventKind(StrEnum):
    """When a watch compares both sides."""

    SYNC = "sync"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a comparison.

    Args:
        step: number of the step, from 1.
        version: number of the weights: how many syncs there were.
        metrics: how far trainer and engine differ.
        findings: what is wrong; empty if nothing is.
    """

    step: int
    version: int
    metrics: StepMetrics
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether tokens were compared, and nothing is wrong."""
        return self.metrics.tokens > 0 and not any(finding.level is Severity.FAILURE for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A sync or a step.

    Args:
        kind: which of them.
        bars: published bounds.
        bound: largest healthy `token_mult_prob_error` of rollouts.
        probe_bound: largest healthy one of probes; None if the probes are not scored.
        transfer: the sync.
        tokenizer: parts of the tokenizer that changed.
        other_tokens: rows that have other token IDs in the trainer, the number of rows there, and in the engine.
        versions: versions of the weights that sampled the rows; empty if unknown.
        oldest, newest: versions that may have sampled. With unlimited staleness, `oldest` is minus infinity.
    """

    kind: EventKind
    bars: Bars
    bound: float
    probe_bound: float | None = None
    transfer: Transfer | None = None
    tokenizer: tuple[str, ...] = ()
    other_tokens: tuple[tuple[int, ...], int, int] | None = None
    versions: tuple[int, ...] = ()
    oldest: int | float = 0
    newest: int = 0

    def findings(self, evidence: DriftEvidence) -> list[Finding]:
        """Return the findings.

        Args:
            evidence: facts and measurements of both sides.
        """
        if self.kind is EventKind.SYNC:
            of_transfer = () if self.transfer is None else self.transfer.findings()
            return [*of_transfer, *self._tokenizer_findings(), *self._probe_findings(evidence)]
        return self._step_findings(evidence)

    def _probe_findings(self, evidence: DriftEvidence) -> Iterator[Finding]:
        """Score the probes; a finding if they differ."""
        if self.probe_bound is not None:
            probe_error = evidence.measured.probe_error()
            if not probe_error <= self.probe_bound:
                yield with_level(diagnose_probes(evidence, probe_error), probe_error > self.bars.token_mult_prob_error)

    def _step_findings(self, evidence: DriftEvidence) -> list[Finding]:
        metrics = evidence.metrics
        assert metrics is not None
        rows = self._rows_of_other_weights()
        compared = [
            finding for finding in uncompared(metrics) if not rows or finding.cause is not Cause.NOTHING_COMPARED
        ]
        findings = [*self._token_findings(), *rows, *compared]
        is_above = metrics.above(self.bars)
        if metrics.tokens and not metrics.excess + 1.0 <= self.bound and not findings:
            findings.append(self._diagnosed(evidence))
        elif is_above and not findings:
            message = f"{', '.join(is_above)}; the noise floor explains up to {shown_error(self.bound)}"
            findings.append(Finding(cause=Cause.PRECISION, level=Severity.WARNING, message=message))
        return [with_level(finding, bool(is_above)) for finding in findings]

    def _diagnosed(self, evidence: DriftEvidence) -> Finding:
        if self.probe_bound is not None and (probe_error := evidence.measured.probe_error()) > self.probe_bound:
            return diagnose_probes(evidence, probe_error)
        return diagnose_step(evidence)

    def _tokenizer_findings(self) -> Iterator[Finding]:
        if self.tokenizer:
            message = "the tokenizer changed during training"
            yield Finding(cause=Cause.TOKENS, message=message, names=self.tokenizer)

    def _token_findings(self) -> Iterator[Finding]:
        if self.other_tokens is not None:
            wrong, in_trainer, in_engine = self.other_tokens
            if wrong or in_trainer != in_engine:
                message = f"{len(wrong)} of {in_engine} rows have other token IDs in the trainer than in the engine"
                yield Finding(cause=Cause.TOKENS, message=message, names=tuple(f"row {row}" for row in wrong))

    def _rows_of_other_weights(self) -> list[Finding]:
        """Return a finding about rows that are too old, or if all are older than the weights."""
        stale = [version for version in self.versions if not self.oldest <= version <= self.newest]
        if stale:
            message = (
                f"{len(stale)} of {len(self.versions)} rows were sampled with versions {sorted(set(stale))}, "
                f"expected {self.oldest} to {self.newest}"
            )
            return [Finding(cause=Cause.STALE_WEIGHTS, message=message)]
        if self.versions and self.newest not in self.versions:
            message = "every row was sampled by earlier weights, which max_staleness allows, so no token was compared"
            return [Finding(cause=Cause.LAGGING, level=Severity.WARNING, message=message)]
        return []

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, which `parsed` reads."""
        values = asdict(self)
        if self.transfer is not None:
            before = self.transfer.before
            values["transfer"]["before"] = {"version": before.version, "sent": dict(before.sent)}
        return values


def evidence_to_json(evidence: DriftEvidence) -> dict[str, Any]:
    """Return the numbers of an evidence as JSON values."""
    return {
        "sampling": asdict(evidence.sampling),
        "sync": {
            "version": evidence.sync.version,
            "count": evidence.sync.count,
            "changed": None if evidence.sync.changed is None else sorted(evidence.sync.changed),
        },
        "steps_since_sync": evidence.steps_since_sync,
        "agreed_at": evidence.agreed_at,
        "history": [asdict(metrics) for metrics in evidence.history],
        "metrics": None if evidence.metrics is None else asdict(evidence.metrics),
    }


def evidence_from_json(content: Mapping[str, Any], **more: Any) -> DriftEvidence:
    """Parse the output of `evidence_to_json`.

    Args:
        content: the JSON values.
        more: measurements and tensors of the evidence.
    """
    sync = content["sync"]
    return DriftEvidence(
        sampling=parsed(Sampling, content["sampling"]),
        sync=parsed(Sync, {"count": sync["version"], **sync}),  # in older capsules, versions counted from 0
        steps_since_sync=content["steps_since_sync"],
        agreed_at=content["agreed_at"],
        history=parsed(tuple[StepMetrics, ...], content["history"]),
        metrics=parsed(StepMetrics | None, content["metrics"]),
        **more,
    )
