"""Record the numbers of every release of transformers, and write a page of every change between two releases.

    python -m tools.release_check.replay --from 5.5 --to 5.24 --out DIR

The same command resumes an interrupted run, and records classes again that a time limit ended. `judgments.json`
lists which changes upstream intended.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import InvalidVersion, Version

from tools.checkout import ROOT
from tools.commands import command_line, stderr
from tools.release_check.changes_page import page, share
from tools.release_check.errors import ReleaseCheckError
from tools.release_check.judgments import read_causes, rows_of, unused_causes
from tools.release_check.numbers.changes import ChangeGroup, UpstreamDifference, groups_of
from tools.release_check.numbers.facts import Kind, SectionRecord, compare
from tools.release_check.numbers.library_cases import recorded_names
from tools.release_check.packages import index
from tools.release_check.packages.environments import make_environment, wheels_folder
from tools.release_check.phases import RECORD, complete_records, read_records
from tools.release_check.reported import Reported, score
from tools.release_check.upstream_code.sources import sources_of

REPORTED = Path(__file__).with_name("reported_regressions.json")
"""Publicly reported regressions, written down before the first replay."""

PAGE = ROOT / "docs" / "upstream-changes.md"
HOURS = 3600.0


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

    A class without records of a release, or with interrupted ones, is compared with the last release that has some.

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
        for found in complete_records(read_records(file)):
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
            groups += groups_of(changes, UpstreamDifference(old, new), str(version), str(earlier))
        yield groups
        latest |= {name: (version, records) for name, records in of_class.items()}


def recorded_releases(versions: Sequence[Version], out: Path) -> dict[str, list[Version]]:
    """Return the releases on which each class was recorded, without those that lack the class."""
    found: dict[str, list[Version]] = defaultdict(list)
    for version in versions:
        file = out / f"{version}.jsonl"
        records = complete_records(read_records(file))
        for name in sorted({one.architecture for one in records if one.facts.get(Kind.CLASS) != {"present": False}}):
            found[name].append(version)
    return found


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
    versions = releases(_version("--from", first), _version("--to", last))
    if only:
        wanted = {_version("--only", text) for text in only}
        if unknown := wanted.difference(versions):
            raise ReleaseCheckError(f"--only {', '.join(map(str, sorted(unknown)))}: not from {first} to {last}")
        versions = [version for version in versions if version in wanted]
    out.mkdir(parents=True, exist_ok=True)
    found = replay(versions, out.resolve(), name or recorded_names(), jobs, recorded=recorded)
    groups = [group for of_release in found for group in of_release]
    causes = read_causes()
    rows = rows_of(groups, causes)
    for cause in unused_causes(rows, causes, versions):
        stderr.print(f"judgment without a change: {', '.join(sorted(cause.releases))}: {cause.reason}", style="yellow")
    reported = [Reported.from_json(values) for values in json.loads(REPORTED.read_text())]
    result = score(rows, reported, versions)
    to_page.write_text(page(rows, result, versions, recorded_releases(versions, out), reported))
    stderr.print(f"{len(rows)} changes, recall {share(result.recall)}, false alarms {share(result.false_alarm_rate)}")
    stderr.print(f"page: {to_page}")


def _version(option: str, text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise ReleaseCheckError(f"{option} {text}: expected a version, for example 5.24") from error


if __name__ == "__main__":
    command_line(main)(prog_name="replay")
