"""Record the findings of a watch: log them, write a capsule, and raise failures, on several ranks together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from nrl_models.common.logs import get_logger
from nrl_models.errors import SaveError
from nrl_models.watch.diagnosis import DriftEvidence
from nrl_models.watch.drift_capsule import CapsuleWriter
from nrl_models.watch.event import Event, EventKind
from nrl_models.watch.finding import Finding, Severity, fails_elsewhere, raise_failures
from nrl_models.watch.record import Recorder, warning_of_errors
from nrl_models.watch.rollout_tensors import RolloutStep

logger = get_logger(__name__)


class WatchResults:
    """The findings of a run.

    Args:
        recorder: Writes events.
        capsule: Writes the evidence of failures; None for no capsules.
        ranks: Number of ranks, each with a watch.

    Attributes:
        findings: Everything that was found.

    Raises:
        SaveError: If the logs or the capsule cannot be written.
    """

    def __init__(self, recorder: Recorder, capsule: CapsuleWriter | None, ranks: int) -> None:
        self._recorder, self._capsule, self._ranks = recorder, capsule, ranks
        targets = [*recorder.files, *([] if capsule is None else [capsule.target])]
        problems = [f"{target}: {problem}" for target in targets if (problem := _unwritable(target))]
        problems += [f"{file}: is a directory" for file in recorder.files if file.is_dir()]
        if problems:
            raise SaveError("the watch cannot write its results:", *(f"  - {problem}" for problem in problems))
        self.findings: list[Finding] = []
        self._of_syncs: list[Finding] = []

    def add(
        self,
        event: Event,
        evidence: DriftEvidence,
        findings: Sequence[Finding],
        values: Mapping[str, float],
        *,
        step: int,
        fail: bool,
        versions: Sequence[int] | None = None,
        rollouts: RolloutStep | None = None,
    ) -> None:
        """Record an event.

        A log or a capsule that cannot be written is a warning. It neither ends the run nor hides a failure.

        Args:
            event, evidence: The event.
            findings: Its findings.
            values: Measured numbers.
            step: Number of the step.
            fail: Whether to raise failures.
            versions: Version of the weights that sampled each row.
            rollouts: Rollouts of the step; None for a sync.

        Raises:
            DriftError: If there are failures, and `fail`. With several ranks, those of a sync are raised by the next
                step, because an error of one rank alone would leave the others waiting.
        """
        version, model = evidence.sync.version, evidence.measured.sides.model
        known = {(finding.cause, finding.message) for finding in self.findings}
        for finding in findings:
            if (finding.cause, finding.message) not in known:
                logger.warning(f"step {step}, version {version}: {finding}")
        self.findings += findings
        failures = [finding for finding in findings if finding.level is Severity.FAILURE]
        raised, elsewhere = failures if fail else [], False
        if fail and self._ranks > 1:
            self._of_syncs += failures
            raised = []
            if event.kind is not EventKind.SYNC:
                raised, self._of_syncs = self._of_syncs, []
                # Before files are written, which takes this rank longer than the others.
                elsewhere = fails_elsewhere(raised, model)
        self._recorder.write(event.kind, step, version, values, findings, versions)
        if failures and self._capsule is not None:
            with warning_of_errors(f"capsule {self._capsule.target}"):
                self._capsule.write(event, evidence, findings, step, rollouts)
        raise_failures(raised, step, version, elsewhere=elsewhere)


def _unwritable(target: Path) -> str:
    """Return why a file or directory cannot be written or created; empty if it can."""
    existing = next((path for path in (target, *target.absolute().parents) if path.exists()), target)
    if existing != target and not existing.is_dir():
        return f"{existing} is not a directory"
    return "" if os.access(existing, os.W_OK) else f"no permission to write to {existing}"
