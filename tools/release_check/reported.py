"""Judgments of changes, and the score of a replay: how many reported regressions it finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

from packaging.version import Version

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


class Judgment(StrEnum):
    """Whether upstream intended a change."""

    INTENDED = auto()
    REGRESSION = auto()
    FIX = auto()
    """Fixes a regression of an earlier release."""
    FALSE_ALARM = auto()
    """The class did not change, so the comparison is wrong."""
    UNJUDGED = auto()


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
        alarms: Groups of changes.
        false_alarms: Groups judged as false alarms, and groups without a function and a judgment.
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


def score(
    groups: Sequence[ChangeGroup],
    reported: Iterable[Reported],
    judgments: Mapping[str, Mapping[str, str]],
    replayed: Sequence[Version],
) -> Score:
    """Compare the changes that were found with the regressions that were reported."""
    found, missed, unseen = [], [], []
    for one in reported:
        if not one.visible or not one.releases(replayed):
            unseen.append(one.thread)
        elif one.is_found(groups, replayed):
            found.append(one.thread)
        else:
            missed.append(one.thread)
    false = sum(
        judgment_of(group, judgments) is Judgment.FALSE_ALARM
        or (judgment_of(group, judgments) is Judgment.UNJUDGED and not group.functions)
        for group in groups
    )
    return Score(tuple(found), tuple(missed), tuple(unseen), len(groups), false)


def judgment_of(group: ChangeGroup, judgments: Mapping[str, Mapping[str, str]]) -> Judgment:
    """The judgment of a group of changes."""
    return Judgment(judgments.get(group.key, {}).get("judgment", Judgment.UNJUDGED))
