"""Outcomes of architectures sharded over processes, or trained in 4 bits (`make distributed-coverage`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from tools.coverage_pages.overview import Verdict, table
from tools.coverage_pages.results import Kind, Record, Records, grouped

FEATURES = {
    Kind.FSDP: "FSDP2",
    Kind.TP: "TP",
    Kind.EP: "EP",
    Kind.COMPILED: "compiled experts",
    Kind.PP: "PP",
    Kind.QLORA: "QLoRA",
}
"""The sharding features that are tested, with the name of each on the pages."""

MEANINGS = {
    Kind.FSDP: "loads on two processes; exported weights, and the loss and gradients of a step, match a single process",
    Kind.TP: "the same with tensor parallelism",
    Kind.EP: "the same with expert parallelism; only models with experts",
    Kind.COMPILED: "with compiled experts, a step matches a single process: over EP, and in a second test over TP, if "
    "supported",
    Kind.PP: "a step on two pipeline stages (1F1B) matches a single process; only models that generate",
    Kind.QLORA: "training LoRA adapters on a 4-bit checkpoint matches transformers' class",
}
"""The meaning of the verdict `yes` of each feature."""

MOST = 400
"""Maximum length of a reason on a page. The record has the complete text."""


class Status(StrEnum):
    """The status of a test, best first."""

    AGREES = "agrees"
    REFUSED = "refused"
    LIMITED = "limited"
    DISAGREES = "disagrees"
    ERROR = "error"

    @property
    def verdict(self) -> Verdict:
        """The verdict on the pages."""
        return {
            Status.AGREES: Verdict.YES,
            Status.REFUSED: Verdict.RAISES,
            Status.LIMITED: Verdict.LIMITED,
        }.get(self, Verdict.FAILS)

    def is_worse_than(self, other: Status) -> bool:
        """Return True if this status is further from `AGREES` than the other one."""
        order = list(Status)
        return order.index(self) > order.index(other)


@dataclass(frozen=True)
class ShardingOutcome:
    """The outcome of one test.

    Args:
        status: Its status.
        reason: The problems that the validation reports, the message of an error, why transformers' own class also
            fails, or the difference.
    """

    status: Status
    reason: str = ""

    @classmethod
    def of(cls, record: Record) -> ShardingOutcome:
        """Read a recorded outcome."""
        return cls(Status(record.outcome["status"]), record.outcome["reason"])

    def recorded_with(self, versions: Mapping[str, str]) -> Record:
        """Return the record of this outcome."""
        return Record(versions, asdict(self))

    @property
    def summary(self) -> str:
        """The reason on one line, truncated if it is long."""
        text = " ".join(self.reason.split())
        return text if len(text) <= MOST else f"{text[:MOST].rpartition(' ')[0]} …"

    @property
    def quoted(self) -> str:
        """The summary as code in Markdown, because it is the text of an error."""
        text = self.summary.replace("`", "'")
        return f"`{text}`"


def verdicts(records: Records, architecture: str) -> dict[str, Verdict]:
    """Return the verdict of each sharding feature."""
    tried = {
        kind: ShardingOutcome.of(records[kind][architecture]) for kind in FEATURES if architecture in records[kind]
    }
    # Expert parallelism is not tested without experts, and pipeline stages only for models that generate.
    untried = dict.fromkeys((Kind.EP, Kind.COMPILED, Kind.PP), Verdict.NOT_APPLICABLE) if tried else {}
    if Kind.EP in tried and tried[Kind.EP].status == Status.AGREES:
        untried[Kind.COMPILED] = Verdict.NOT_TESTED
    return {
        feature: tried[kind].status.verdict if kind in tried else untried.get(kind, Verdict.NOT_TESTED)
        for kind, feature in FEATURES.items()
    }


def reasons(records: Records, architectures: Iterable[str], labels: Mapping[str, str] | None = None) -> list[str]:
    """List every verdict other than a plain yes with its reason, a line each, with the affected architectures.

    Args:
        records: The recorded outcomes.
        architectures: The architectures.
        labels: Texts to show in place of the names of some architectures.
    """
    tried = (
        (feature, name, ShardingOutcome.of(records[kind][name]))
        for name in architectures
        for kind, feature in FEATURES.items()
        if name in records[kind]
    )
    lines = grouped(
        (
            (f"{feature} {Verdict.RAISES if outcome.status == Status.REFUSED else outcome.status}", outcome.quoted),
            (labels or {}).get(name, name),
        )
        for feature, name, outcome in tried
        if outcome.status != Status.AGREES
    )
    return [f"{verdict} ({', '.join(names)}): {message}" for (verdict, message), names in lines.items()]


def summary(records: Records, architectures: Iterable[str]) -> list[str]:
    """Summarize the outcomes of these architectures as lines of Markdown. Empty without outcomes."""
    shown = (Verdict.YES, Verdict.RAISES, Verdict.LIMITED, Verdict.FAILS, Verdict.NOT_TESTED, Verdict.NOT_APPLICABLE)
    found = [verdicts(records, architecture) for architecture in architectures]
    rows = []
    for kind, feature in FEATURES.items():
        counts = Counter(each[feature] for each in found)
        if records[kind]:
            numbers = [str(counts[verdict]) for verdict in shown]
            rows.append((feature, *numbers, MEANINGS[kind]))
    return [*table(("feature", *shown, "yes means"), rows), ""] if rows else []
