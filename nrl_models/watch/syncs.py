"""Records of weight syncs: what was sent, what arrived, and what changed since the sync before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nrl_models.common.logs import get_logger
from nrl_models.engines.digests import NO_DIGESTS
from nrl_models.engines.engine_types import RefitReport
from nrl_models.errors import UnknownArgumentError, shown
from nrl_models.watch.finding import Cause, Finding, Severity

logger = get_logger(__name__)

DRAFT_SYNCS = 3
"""Syncs with a changed model and unchanged draft layers before these count as frozen."""


def require_sync(sent: Any, report: Any) -> None:
    """Check the arguments of `Watch.after_sync`; None is an argument that was not passed.

    Raises:
        UnknownArgumentError: one has another type.
    """
    if sent is not None and not isinstance(sent, Mapping):
        raise UnknownArgumentError(f"sent={shown(sent)}: expected a digest for each sent tensor, by name")
    if report is not None and not hasattr(report, "digests"):
        raise UnknownArgumentError(f"report={shown(report)}: expected the RefitReport that engine.refit returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """One weight sync.

    Args:
        version: number of the weights: that of the engine, or one more than before.
        count: number of syncs so far; 0 before the first.
        sent: digest of each tensor as last sent, by Hub name; empty if unknown. A partial sync keeps earlier tensors.
        arrived: digest of each tensor as the engine received it; empty if unknown.
        unwritten: tensors of the engine that were not written.
        changed: sent tensors whose digest differs from the one last sent. Tensors that are sent for the first time are
            not in it. None if no digest is known to differ, and that of some tensor is unknown.
    """

    version: int
    count: int = 0
    sent: Mapping[str, str] = field(default_factory=dict)
    arrived: Mapping[str, str] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    changed: frozenset[str] | None = None

    @property
    def same_weights(self) -> bool:
        """Whether this sync is known to have sent the weights of the sync before."""
        return self.changed is not None and not self.changed


def warn_without_digests(sync: Sync, *, probed: bool) -> None:
    """Log once that the engine reports no digests, and how its weights are compared instead.

    Args:
        sync: The last sync.
        probed: Whether probes are scored after syncs.
    """
    if sync.sent and not sync.arrived:
        instead = (
            "probes compare the weights after a sync instead"
            if probed
            else "no probes are scored, so that only log-probabilities of rollouts show missing weights"
        )
        logger.warning_once(f"{NO_DIGESTS}: {instead}")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A weight sync, and the one before.

    Args:
        before: the sync before.
        draft_names: Hub names of the model's draft (MTP) tensors.
        frozen_syncs: syncs before in which the draft tensors stayed the same.
        sent: digest of each sent tensor; empty if unknown.
        report: the engine's report; None if there is none.
        version: number of the weights that the engine reports; None if it reports none.
        learning_rate: largest learning rate of the optimizer steps since the sync before; None if unknown.
        partial: tensors that are not sent keep their values.
    """

    before: Sync
    draft_names: tuple[str, ...] = ()
    frozen_syncs: int = 0
    sent: Mapping[str, str] = field(default_factory=dict)
    report: RefitReport | None = None
    version: int | None = None
    learning_rate: float | None = None
    partial: bool = False

    @cached_property
    def after(self) -> Sync:
        """The sync."""
        before, sent, report = self.before, self.sent, self.report
        known = sent.keys() & before.sent.keys()
        changed: frozenset[str] | None = frozenset(name for name in known if before.sent[name] != sent[name])
        if not changed and not (sent and known == sent.keys()):
            changed = None  # other tensors are sent for the first time
        return Sync(
            version=before.version + 1 if self.version is None else self.version,
            count=before.count + 1,
            sent={**before.sent, **sent} if self.partial and sent else sent,
            arrived={} if report is None else report.digests,
            unwritten=() if report is None else (*report.unwritten, *report.stale_buffers),
            changed=changed,
        )

    @property
    def frozen_syncs_after(self) -> int:
        """`frozen_syncs` with this sync. It counts only syncs in which the model changed."""
        names, changed = self._known_drafts, self.after.changed
        if not names or not changed:
            return self.frozen_syncs
        return 0 if changed & names else self.frozen_syncs + 1

    @property
    def _known_drafts(self) -> set[str]:
        """Draft tensors of this sync and of one before."""
        return {*self.draft_names} & self.sent.keys() & self.before.sent.keys()

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the sync."""
        before, changed, names = self.before, self.after.changed, self._known_drafts
        for problem, missing in self._missing().items():
            if missing:
                message = f"{len(missing)} tensors {problem}"
                yield Finding(cause=Cause.MISSING_WEIGHTS, message=message, names=tuple(sorted(missing)))
        if self.version is not None and self.version <= before.version:
            message = f"the engine reports version {self.version} after this sync, and {before.version} before it"
            yield Finding(cause=Cause.STALE_WEIGHTS, message=message)
        if changed and self.learning_rate == 0:
            message = f"{len(changed)} of {len(self.sent)} tensors changed since the last sync, at learning rate 0"
            yield Finding(cause=Cause.UNEXPECTED_UPDATE, message=message, names=tuple(sorted(changed)))
        if self.frozen_syncs < self.frozen_syncs_after == DRAFT_SYNCS:
            message = f"{len(names)} draft tensors did not change in {DRAFT_SYNCS} syncs in which the model changed"
            yield Finding(cause=Cause.FROZEN_DRAFT, level=Severity.WARNING, message=message, names=tuple(sorted(names)))

    def _missing(self) -> dict[str, list[str]]:
        """Return names of tensors by problem."""
        sent, arrived = self.sent, self.after.arrived
        problems: dict[str, list[str]] = {}
        if not self.partial:
            problems["were not written in the engine"] = list(self.after.unwritten)
            problems["were sent before, and not in this sync"] = [
                name for name in self.before.sent if sent and name not in sent
            ]
        if sent and arrived:
            problems["were sent and did not arrive"] = [name for name in sent if name not in arrived]
            problems["arrived changed"] = [name for name, digest in sent.items() if arrived.get(name, digest) != digest]
        return problems
