"""Records of weight syncs: what was sent, what arrived, and what changed since the sync before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nrl_models.common.logs import get_logger
from nrl_models.engines.digests import NO_DIGESTS, tensor_digest
from nrl_models.engines.engine_types import NamedTensor, RefitReport
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


def digested_after_check(tensors: Iterable[NamedTensor], digests: dict[str, str]) -> Iterable[NamedTensor]:
    """Yield the tensors of a refit, and add the digest of each to `digests` when the next one is requested.

    By then the engine has checked the tensor. Arguments that are not pairs of name and tensor are passed on, so that
    the engine's error describes them.

    Args:
        tensors: Pairs of Hub name and tensor.
        digests: Digests by name; filled.
    """
    if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        return tensors

    def stream() -> Iterator[NamedTensor]:
        for pair in tensors:
            yield pair
            name, tensor = pair
            digests[name] = tensor_digest(tensor)

    return stream()


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


class SyncLog:
    """The syncs of a run.

    Args:
        draft_names: Hub names of the model's draft (MTP) tensors.
        version: number of the engine's weights before the first sync.
    """

    def __init__(self, draft_names: Collection[str] = (), version: int = 0) -> None:
        self.last = Sync(version=version)
        self.draft_names = frozenset(draft_names)
        self.frozen_syncs = 0

    def add(
        self,
        sent: Mapping[str, str],
        report: RefitReport | None,
        *,
        version: int | None,
        learning_rate: float | None,
        partial: bool = False,
    ) -> Iterator[Finding]:
        """Record a sync, and yield what is wrong with it.

        Args:
            sent: digest of each sent tensor; empty if unknown.
            report: the engine's report; None if there is none.
            version: number of the weights that the engine reports; None if it reports none.
            learning_rate: largest learning rate of the optimizer steps since the last sync; None if unknown.
            partial: tensors that are not sent keep their values.
        """
        before = self.last
        known = sent.keys() & before.sent.keys()
        changed: frozenset[str] | None = frozenset(name for name in known if before.sent[name] != sent[name])
        if not changed and not (sent and known == sent.keys()):
            changed = None  # other tensors are sent for the first time
        unwritten = () if report is None else (*report.unwritten, *report.stale_buffers)
        arrived = {} if report is None else report.digests
        self.last = Sync(
            version=before.version + 1 if version is None else version,
            count=before.count + 1,
            sent={**before.sent, **sent} if partial and sent else sent,
            arrived=arrived,
            unwritten=unwritten,
            changed=changed,
        )
        yield from self._missing(sent, () if partial else before.sent.keys(), () if partial else unwritten)
        if version is not None and version <= before.version:
            message = f"the engine reports version {version} after this sync, and {before.version} before it"
            yield Finding(cause=Cause.STALE_WEIGHTS, message=message)
        if changed and learning_rate == 0:
            message = f"{len(changed)} of {len(sent)} tensors changed since the last sync, at learning rate 0"
            yield Finding(cause=Cause.UNEXPECTED_UPDATE, message=message, names=tuple(sorted(changed)))
        yield from self._frozen_draft(known)

    def _missing(
        self, sent: Mapping[str, str], earlier: Collection[str], unwritten: Collection[str]
    ) -> Iterator[Finding]:
        arrived = self.last.arrived
        problems = {
            "were not written in the engine": list(unwritten),
            "were sent before, and not in this sync": [name for name in earlier if sent and name not in sent],
        }
        if sent and arrived:
            problems |= {
                "were sent and did not arrive": [name for name in sent if name not in arrived],
                "arrived changed": [name for name, digest in sent.items() if arrived.get(name, digest) != digest],
            }
        for problem, names in problems.items():
            if names:
                message = f"{len(names)} tensors {problem}"
                yield Finding(cause=Cause.MISSING_WEIGHTS, message=message, names=tuple(sorted(names)))

    def _frozen_draft(self, known: Collection[str]) -> Iterator[Finding]:
        changed = self.last.changed
        names = self.draft_names.intersection(known)
        if not names or not changed:
            return
        self.frozen_syncs = 0 if changed & names else self.frozen_syncs + 1
        if self.frozen_syncs == DRAFT_SYNCS:
            message = f"{len(names)} draft tensors did not change in {DRAFT_SYNCS} syncs in which the model changed"
            yield Finding(cause=Cause.FROZEN_DRAFT, level=Severity.WARNING, message=message, names=tuple(sorted(names)))
