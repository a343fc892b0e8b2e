"""The score of a replay: how many reported regressions it finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from tools.release_check.judgments import Judgment, Row
from tools.release_check.numbers.changes import ChangeGroup
from tools.release_check.numbers.facts import Kind

SHOWN_BY: Mapping[str, frozenset[Kind]] = {
    "logits": frozenset({Kind.NUMBERS, Kind.LOW_PRECISION, Kind.TOKENS}),
    "cached_step": frozenset({Kind.NUMBERS, Kind.TOKENS, Kind.ERROR}),
    "greedy": frozenset({Kind.NUMBERS, Kind.TOKENS, Kind.ERROR}),
    "gradients": frozenset({Kind.GRADIENTS}),
    "distributed": frozenset({Kind.GRADIENTS, Kind.NUMBERS}),
    "saved_file": frozenset({Kind.FILES}),
    "dtype": frozenset({Kind.DTYPES}),
    "loading": frozenset({Kind.LOADING, Kind.NUMBERS, Kind.FILES, Kind.ERROR}),
    "tied_weights": frozenset({Kind.TIES, Kind.LOADING, Kind.NUMBERS}),
    "tokenizer": frozenset(),
}
"""By the observation of a reported regression, the kinds of facts that reveal it."""


@dataclass(frozen=True)
class Reported:
    """A publicly reported regression.

    Args:
        thread: The report.
        introduced: The first release that has it.
        fixed: The release that fixes it. None if it is not fixed.
        architectures: Affected classes.
        file: The transformers file that causes it.
        observation: A key of `SHOWN_BY`.
        visible: Whether it is visible without a GPU.
    """

    thread: str
    introduced: Version
    fixed: Version | None
    architectures: frozenset[str]
    file: str
    observation: str
    visible: bool

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Reported:
        """Read an entry of `reported_regressions.json`."""
        fixed = values["fixed"]
        return cls(
            values["thread"],
            Version(values["introduced"]),
            Version(fixed) if fixed else None,
            frozenset(values["architectures"]),
            values["function"].partition("::")[0],
            values["observation"],
            values["visible_on_cpu"],
        )

    def releases(self, replayed: Sequence[Version]) -> list[Version]:
        """Return the replayed releases in which it starts or ends. The first release has no predecessor."""
        return [version for version in replayed[1:] if version in (self.introduced, self.fixed)]

    def is_found(self, groups: Iterable[ChangeGroup], replayed: Sequence[Version]) -> bool:
        """Return True if the reported results of an affected class changed in such a release, with its file as the
        cause.
        """
        releases = {str(version) for version in self.releases(replayed)}
        module = "transformers." + self.file.removesuffix(".py").replace("/", ".")
        return any(
            group.version in releases
            and group.fact in SHOWN_BY[self.observation]
            and bool(self.architectures & set(group.architectures))
            and any(name.partition(":")[0] == module for name in group.functions)
            for group in groups
        )


@dataclass(frozen=True)
class Score:
    """How well a replay finds reported regressions.

    Args:
        found: Reported regressions that a change reveals.
        missed: Reported regressions that no change reveals.
        unseen: Regressions that cannot be visible: they need a GPU, or start and end outside of the replayed releases.
        alarms: Rows of the page.
        false_alarms: Rows judged as false alarms, and rows without a function and a judgment.
    """

    found: tuple[str, ...]
    missed: tuple[str, ...]
    unseen: tuple[str, ...]
    alarms: int
    false_alarms: int

    @property
    def recall(self) -> float | None:
        """The fraction of visible regressions that are found. None without any."""
        return len(self.found) / count if (count := len(self.found) + len(self.missed)) else None

    @property
    def false_alarm_rate(self) -> float | None:
        """The fraction of false alarms. None without alarms."""
        return self.false_alarms / self.alarms if self.alarms else None


def score(rows: Sequence[Row], reported: Iterable[Reported], replayed: Sequence[Version]) -> Score:
    """Compare the changes that were found with the regressions that were reported."""
    groups = [group for row in rows for group in row.groups]
    found, missed, unseen = [], [], []
    for one in reported:
        if not one.visible or not one.releases(replayed):
            unseen.append(one.thread)
        elif one.is_found(groups, replayed):
            found.append(one.thread)
        else:
            missed.append(one.thread)
    false = sum(
        row.judgment is Judgment.FALSE_ALARM or (row.judgment is Judgment.UNJUDGED and not row.functions)
        for row in rows
    )
    return Score(tuple(found), tuple(missed), tuple(unseen), len(rows), false)
