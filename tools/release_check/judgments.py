"""Judged causes of changes, and the rows of the page: one for each cause, one for each group without a judgment."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from tools.release_check.numbers.changes import ChangeGroup
from tools.release_check.numbers.facts import Change, Kind, Section

JUDGMENTS = Path(__file__).with_name("judgments.json")
"""A list of causes. Edited by hand."""


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
class Cause:
    """One upstream change that was judged, and the results that it changes.

    Args:
        releases: Releases in which the results change.
        judgment: Whether upstream intended it.
        reason: The upstream change.
        functions: The functions behind it, without the prefix `transformers.`. If empty, the groups' first functions.
        classes: Classes that it changes. Empty for all.
        kinds: Kinds of facts that it changes. Empty for all.
        sections: Sections that it changes. Empty for all.
    """

    releases: frozenset[str]
    judgment: Judgment
    reason: str
    functions: tuple[str, ...] = ()
    classes: frozenset[str] = frozenset()
    kinds: frozenset[Kind] = frozenset()
    sections: frozenset[Section] = frozenset()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cause:
        """Read an entry of `judgments.json`."""
        return cls(
            frozenset(values["releases"]),
            Judgment(values["judgment"]),
            values["reason"],
            tuple(values.get("functions", ())),
            frozenset(values.get("classes", ())),
            frozenset(Kind(kind) for kind in values.get("kinds", ())),
            frozenset(Section(section) for section in values.get("sections", ())),
        )

    def explains(self, release: str, change: Change) -> bool:
        """Return True if a change in a release has this cause."""
        return (
            release in self.releases
            and (not self.classes or change.architecture in self.classes)
            and (not self.kinds or change.kind in self.kinds)
            and (not self.sections or change.section in self.sections)
        )


def read_causes(path: Path = JUDGMENTS) -> list[Cause]:
    """Read `judgments.json`."""
    return [Cause.from_json(values) for values in json.loads(path.read_text())]


@dataclass(frozen=True)
class Row:
    """Changes with one judged cause, or one group without a judgment.

    Args:
        groups: The groups, reduced to the changes of the cause.
        cause: The cause. None without a judgment.
    """

    groups: tuple[ChangeGroup, ...]
    cause: Cause | None = None

    @property
    def judgment(self) -> Judgment:
        """The judgment of the cause."""
        return self.cause.judgment if self.cause else Judgment.UNJUDGED

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions of the cause, otherwise those of the groups."""
        if self.cause and self.cause.functions:
            return self.cause.functions
        return tuple(dict.fromkeys(name for group in self.groups for name in group.functions))

    @property
    def versions(self) -> tuple[str, ...]:
        """The releases in which the changes were recorded first."""
        return _ordered(group.version for group in self.groups)

    @property
    def since(self) -> tuple[str, ...]:
        """The releases that these were compared with."""
        return _ordered(group.since for group in self.groups)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """All changes."""
        return tuple(change for group in self.groups for change in group.changes)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes that changed."""
        return tuple(sorted({change.architecture for change in self.changes}))


def rows_of(groups: Iterable[ChangeGroup], causes: Sequence[Cause]) -> list[Row]:
    """Return a row for each cause, and one for each group that has changes without a cause.

    The first cause counts if several explain a change.
    """
    of_cause: dict[int, list[ChangeGroup]] = defaultdict(list)
    rows: list[Row | int] = []
    for group in groups:
        parts: dict[int | None, list[Change]] = defaultdict(list)
        for change in group.changes:
            explaining = (i for i, cause in enumerate(causes) if cause.explains(group.version, change))
            parts[next(explaining, None)].append(change)
        for number, changes in parts.items():
            part = replace(group, changes=tuple(changes))
            if number is None:
                rows.append(Row((part,)))
                continue
            if number not in of_cause:
                rows.append(number)
            of_cause[number].append(part)
    return [row if isinstance(row, Row) else Row(tuple(of_cause[row]), causes[row]) for row in rows]


def unused_causes(rows: Iterable[Row], causes: Iterable[Cause], replayed: Iterable[Version]) -> list[Cause]:
    """Return causes in replayed releases that explain no change."""
    used, releases = {row.cause for row in rows}, {str(version) for version in replayed}
    return [cause for cause in causes if cause not in used and cause.releases & releases]


def _ordered(versions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(filter(None, set(versions)), key=Version))
