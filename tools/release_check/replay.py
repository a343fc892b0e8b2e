"""Record the numbers of every release of transformers, and write a page of every change between two releases.

    python -m tools.release_check.replay --from 5.5 --to 5.24 --out DIR

The same command resumes an interrupted run. `judgments.json` lists which changes upstream intended.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import Version

from tools.checkout import ROOT
from tools.commands import command_line, stderr
from tools.release_check.errors import ReleaseCheckError
from tools.release_check.numbers.changes import ChangeGroup, UpstreamDifference, groups_of
from tools.release_check.numbers.facts import Kind, SectionRecord, compare
from tools.release_check.numbers.library_cases import recorded_names
from tools.release_check.packages import index
from tools.release_check.packages.environments import make_environment
from tools.release_check.phases import RECORD, read_records, wheels_folder
from tools.release_check.upstream_code.sources import sources_of

JUDGMENTS = Path(__file__).with_name("judgments.json")
"""By the key of a group of changes: `{"judgment": "intended", "reason": "..."}`. Edited by hand."""

REPORTED = Path(__file__).with_name("reported_regressions.json")
"""Publicly reported regressions, written down before the first replay."""

PAGE = ROOT / "docs" / "upstream-changes.md"
HOURS = 3600.0
MOST_NAMES, MOST_FUNCTIONS = 6, 3


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
        visible: Whether it is visible without a GPU.
    """

    thread: str
    introduced: Version
    fixed: Version | None
    architectures: frozenset[str]
    file: str
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
            values["visible_on_cpu"],
        )

    def releases(self, replayed: Sequence[Version]) -> list[Version]:
        """Return the replayed releases in which it starts or ends. The first release has no predecessor."""
        return [version for version in replayed[1:] if version in (self.introduced, self.fixed)]

    def is_found(self, groups: Iterable[ChangeGroup], replayed: Sequence[Version]) -> bool:
        """Return True if an affected class changed in such a release, with its file as the cause."""
        releases = {str(version) for version in self.releases(replayed)}
        module = "transformers." + self.file.removesuffix(".py").replace("/", ".")
        return any(
            group.version in releases
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


def releases(first: Version, last: Version) -> list[Version]:
    """Return final releases of transformers in a range, in order. `5.24` is its newest patch release.

    Raises:
        ReleaseCheckError: There are fewer than two.
        NoIndexError: The index does not respond.
    """
    found = [
        version
        for version in index.wheels("transformers")
        if not version.is_prerelease and first <= version and version.release[: len(last.release)] <= last.release
    ]
    if len(found) < 2:
        raise ReleaseCheckError(f"transformers {first} to {last}: expected at least two releases, not {len(found)}")
    return found


def record(version: Version, out: Path, names: Sequence[str], jobs: int) -> Path:
    """Record the numbers of a release in a separate environment. Returns the file.

    Raises:
        InstallError: pip cannot install the release.
        ReleaseCheckError: The run fails.
    """
    file, log = out / f"{version}.jsonl", out / f"{version}.log"
    environment = make_environment({"transformers": version}, ROOT)
    arguments = [*RECORD, "--out", str(file), "--jobs", str(jobs), "--names", *names]
    if status := environment.run(arguments, log, timeout=3 * HOURS):
        raise ReleaseCheckError(f"transformers {version}: exit status {status}. Log: {log}")
    return file


def replay(
    versions: Sequence[Version], out: Path, names: Sequence[str], jobs: int, *, recorded: bool = False
) -> Iterator[list[ChangeGroup]]:
    """Record every release, and yield the changes of each but the first. A release that cannot be recorded is left out.

    A class that a release has no records of is compared with the last release that has some.

    Args:
        versions: releases in order.
        out: folder for records.
        names: architectures.
        jobs: processes at once.
        recorded: record nothing, and use the files in `out`.
    """
    latest: dict[str, tuple[Version, list[SectionRecord]]] = {}
    for version in versions:
        stderr.print(f"transformers {version}")
        try:
            file = out / f"{version}.jsonl" if recorded else record(version, out, names, jobs)
        except ReleaseCheckError as error:
            stderr.print(str(error), style="red", markup=False, soft_wrap=True)
            continue
        of_class: dict[str, list[SectionRecord]] = defaultdict(list)
        for found in read_records(file) if file.is_file() else ():
            of_class[found.architecture].append(found)
        new = sources_of("transformers", version, wheels_folder())
        groups: list[ChangeGroup] = []
        for earlier in sorted({latest[name][0] for name in of_class if name in latest}):
            changes = [
                change
                for name, records in of_class.items()
                if name in latest and latest[name][0] == earlier
                for change in compare(latest[name][1], records)
                if change.kind != Kind.CLASS  # a class that appears is not a change of a class
            ]
            old = sources_of("transformers", earlier, wheels_folder())
            groups += groups_of(changes, UpstreamDifference(old, new), str(version))
        yield groups
        latest |= {name: (version, records) for name, records in of_class.items()}


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


def page(
    groups: Sequence[ChangeGroup],
    judgments: Mapping[str, Mapping[str, str]],
    result: Score,
    replayed: Sequence[Version],
) -> str:
    """The page of changes."""
    counts = Counter(judgment_of(group, judgments) for group in groups)
    lines = [
        "<!-- Written by `python -m tools.release_check.replay`; edit tools/release_check/judgments.json instead. -->",
        "# Changes of transformers",
        "",
        f"This page lists what changed in transformers from {replayed[0]} to {replayed[-1]} for the classes that "
        "nrl_models supports: numbers, names, dtypes and files. Every release ran on the same tiny checkpoints and "
        "inputs. Functions are those whose code differs between two releases.",
        "",
        f"- {len(groups)} changes: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items())) or 'none'}",
        f"- reported regressions found: {_share(result.recall)} "
        f"({len(result.found)} of {len(result.found) + len(result.missed)}; {len(result.unseen)} cannot show here)",
        f"- false alarms: {_share(result.false_alarm_rate)} ({result.false_alarms} of {result.alarms})",
    ]
    for version in dict.fromkeys(group.version for group in groups):
        lines += ["", f"## {version}", "", "| architectures | change | upstream | judgment |", "|---|---|---|---|"]
        lines += [_row(group, judgments) for group in groups if group.version == version]
    if result.missed:
        lines += ["", "## Reported regressions that no change shows", "", *(f"- {name}" for name in result.missed)]
    return "\n".join([*lines, ""])


def _row(group: ChangeGroup, judgments: Mapping[str, Mapping[str, str]]) -> str:
    first = group.changes[0]
    amount = f", up to {group.max_diff:.2g}" if group.max_diff is not None else ""
    sections = ", ".join(sorted({str(change.section) for change in group.changes}))
    example = "" if group.max_diff is not None else f"; {first.key}: {first.before!s:.40} to {first.after!s:.40}"
    functions = "<br>".join(f"`{name.removeprefix('transformers.')}`" for name in group.functions[:MOST_FUNCTIONS])
    reason = judgments.get(group.key, {}).get("reason", "")
    judged = judgment_of(group, judgments) + (f": {reason}" if reason else "")
    cells = (_names(group.architectures), f"{group.fact} ({sections}){amount}{example}", functions or "-", judged)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def main(
    first: Annotated[str, typer.Option("--from", help="First release, e.g. 5.5.")],
    last: Annotated[str, typer.Option("--to", help="Last release, e.g. 5.24.")],
    out: Annotated[Path, typer.Option(help="Folder for the records of each release.")],
    only: Annotated[list[str] | None, typer.Option(help="Release. Repeatable. Default: all in between.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Architecture. Repeatable. Default: all.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once. Default: one per core.")] = os.cpu_count() or 1,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Record nothing: write the page from the records in --out.")
    ] = False,
    to_page: Annotated[Path, typer.Option("--page", help="Page to write.")] = PAGE,
) -> None:
    """Record the numbers of every release of transformers, and write a page of every change."""
    versions = releases(Version(first), Version(last))
    if only:
        versions = [version for version in versions if str(version) in only]
    out.mkdir(parents=True, exist_ok=True)
    found = replay(versions, out.resolve(), name or recorded_names(), jobs, recorded=recorded)
    groups = [group for of_release in found for group in of_release]
    judgments = _read(JUDGMENTS) or {}
    reported = [Reported.from_json(values) for values in _read(REPORTED) or []]
    result = score(groups, reported, judgments, versions)
    to_page.write_text(page(groups, judgments, result, versions))
    stderr.print(
        f"{len(groups)} changes, recall {_share(result.recall)}, false alarms {_share(result.false_alarm_rate)}"
    )
    stderr.print(f"page: {to_page}")


if __name__ == "__main__":
    command_line(main)(prog_name="replay")
