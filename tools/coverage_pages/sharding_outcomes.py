"""The outcomes of architectures sharded over processes, or trained in 4 bits (`make distributed-coverage`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from tools.coverage_pages.overview import Verdict
from tools.coverage_pages.results import Kind, Record, Records, grouped, versions_summary

FEATURES = {
    Kind.FSDP: "FSDP2",
    Kind.TP: "TP",
    Kind.EP: "EP",
    Kind.PP: "PP",
    Kind.QLORA: "QLoRA",
}
"""What is tried of an architecture, and what the pages call it."""

_MEANING = (
    'FSDP2, TP and EP stand for loading over two processes with `plan="auto"`: exported weights bit for bit those of '
    "the checkpoint, loss and gradients of a step those of one process. `refused` is refused before anything is read, "
    "for the reason on the family's page; EP is for models with experts. PP stands for a step over two stages under "
    "1F1B, its loss and gradients those of one process, of models that generate. QLoRA stands for training adapters on "
    "a checkpoint in 4 bits, against transformers' own class."
)

MOST = 400
"""Characters of a reason that a page shows; the record has all."""


class Status(StrEnum):
    """How a try ended, best first."""

    AGREES = "agrees"
    REFUSED = "refused"
    LIMITED = "limited"
    DISAGREES = "disagrees"
    ERROR = "error"

    @property
    def verdict(self) -> Verdict:
        """What the pages call it."""
        return {
            Status.AGREES: Verdict.YES,
            Status.REFUSED: Verdict.REFUSED,
            Status.LIMITED: Verdict.LIMITED,
        }.get(self, Verdict.FAILS)

    def is_worse_than(self, other: Status) -> bool:
        """Whether it is further from `AGREES`."""
        order = list(Status)
        return order.index(self) > order.index(other)


@dataclass(frozen=True)
class ShardingOutcome:
    """What came out of one try.

    Args:
        status: how it ended.
        reason: the problems of a refusal, the message of an error, why transformers' own class cannot do it either, or
            what differs.
    """

    status: Status
    reason: str = ""

    @classmethod
    def of(cls, record: Record) -> ShardingOutcome:
        """What is recorded."""
        return cls(Status(record.outcome["status"]), record.outcome["reason"])

    def recorded_with(self, versions: Mapping[str, str]) -> Record:
        """The record of it."""
        return Record(versions, asdict(self))

    @property
    def summary(self) -> str:
        """The reason on one line, cut off if it is long."""
        text = " ".join(self.reason.split())
        return text if len(text) <= MOST else f"{text[:MOST]} …"


def verdicts(records: Records, architecture: str) -> dict[str, Verdict]:
    """For each feature of sharding its verdict."""
    tried = {
        kind: ShardingOutcome.of(records[kind][architecture]) for kind in FEATURES if architecture in records[kind]
    }
    # Expert parallelism is not tried of models without experts, stages of those that do not generate.
    untried = dict.fromkeys((Kind.EP, Kind.PP), Verdict.NOT_APPLICABLE) if tried else {}
    return {
        feature: tried[kind].status.verdict if kind in tried else untried.get(kind, Verdict.NOT_TESTED)
        for kind, feature in FEATURES.items()
    }


def reasons(records: Records, architectures: Iterable[str]) -> list[str]:
    """Whatever is not a plain yes, with the reason: a line each, with the architectures it is said of."""
    tried = (
        (feature, name, ShardingOutcome.of(records[kind][name]))
        for name in architectures
        for kind, feature in FEATURES.items()
        if name in records[kind]
    )
    lines = grouped(
        (f"{feature} {outcome.status}: {outcome.summary}", name)
        for feature, name, outcome in tried
        if outcome.status != Status.AGREES
    )
    return [f"{line} ({', '.join(names)})" for line, names in lines.items()]


def summary(records: Records) -> list[str]:
    """The outcomes of all architectures, as lines of Markdown; none without outcomes."""
    lines = []
    for kind, feature in FEATURES.items():
        counts = Counter(ShardingOutcome.of(record).status.verdict for record in records[kind].values())
        shown = (Verdict.YES, Verdict.REFUSED, Verdict.LIMITED, Verdict.FAILS)
        numbers = ", ".join(f"{counts[verdict]} {verdict}" for verdict in shown)
        if records[kind]:
            lines.append(f"- {feature}: {numbers}; with {versions_summary(records[kind])}")
    return [_MEANING, "", *lines, ""] if lines else []
