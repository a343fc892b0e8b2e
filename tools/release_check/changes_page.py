"""The page of changes between releases of transformers, `docs/upstream-changes.md`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from packaging.version import Version

from tools.release_check.judgments import Row
from tools.release_check.numbers.facts import Change, Kind
from tools.release_check.reported import Reported, Score

MOST_FUNCTIONS, MOST_SECTIONS, MOST_CHARACTERS = 2, 3, 60


def page(
    rows: Sequence[Row],
    result: Score,
    replayed: Sequence[Version],
    recorded: Mapping[str, Sequence[Version]],
    reported: Sequence[Reported],
) -> str:
    """Return the page of changes.

    Args:
        rows: Changes of all releases, by cause.
        result: The score.
        replayed: Releases in order.
        recorded: Releases on which a class was recorded, by class.
        reported: Reported regressions.
    """
    counts = Counter(row.judgment for row in rows)
    visible = len(result.found) + len(result.missed)
    lines = [
        "<!-- Written by `python -m tools.release_check.replay`; edit tools/release_check/judgments.json instead. -->",
        "# Changes of transformers",
        "",
        f"This page lists changes in the results of transformers from {replayed[0]} to {replayed[-1]}, for "
        f"{len(recorded)} classes: computed numbers, tensor names, dtypes and saved files. Every release under "
        "[Recorded releases](#recorded-releases) ran on the same tiny checkpoints and inputs. "
        "[Replay earlier releases](release-check.md#replay-earlier-releases) describes the command.",
        "",
        f"- {len(rows)} changes: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items())) or 'none'}",
        f"- reported regressions found: {share(result.recall)} "
        f"({len(result.found)} of {visible}; {len(result.unseen)} others cannot be found by this replay: they need a "
        "GPU, or no release in this range introduced or fixed them)",
        f"- false alarms: {share(result.false_alarm_rate)} ({result.false_alarms} of {result.alarms})",
        "",
        "The checks were written after these reports, so this share says nothing about unknown regressions. A false "
        "alarm is a change with this judgment, or a change without a judgment although no function that the class "
        "uses has changed.",
        "",
        "## Changes",
        "",
        "A row is one change of transformers and all results that it changed. The columns:",
        "",
        "- `release`: the first recorded release in which a result changed. [Not every class ran on every "
        "release](#recorded-releases), so a row can have several releases, and transformers may have changed earlier.",
        "- `change`: the kinds of results that changed, each with the checks that found it in parentheses. Then an "
        "example, or the largest difference. A result of the kind `fields` is the list of the output's fields. "
        "Tensors are shown as shape, dtype and the first digits of a hash.",
        "- `upstream`: what differs in the code of the compared releases (functions, classes and constants).",
        '- `judgment`: whether transformers intended the change, fixed a bug or introduced one. "Loads only from this '
        'release on" means that the row also has errors and missing results of the releases before.',
        "",
        "| release | compared with | classes | change | upstream | judgment |",
        "|---|---|---|---|---|---|",
        *(_row(row) for row in rows),
        "",
        "## Reported regressions",
        "",
        "| report | first release with it | release that changed it | result |",
        "|---|---|---|---|",
        *(_reported_row(one, result) for one in reported),
        "",
        "## Recorded releases",
        "",
        *_coverage(recorded, replayed),
        "",
    ]
    return "\n".join(lines)


def share(value: float | None) -> str:
    """Format a fraction in percent."""
    return "none" if value is None else f"{value:.0%}"


def _row(row: Row) -> str:
    functions = "<br>".join(f"`{name.removeprefix('transformers.')}`" for name in row.functions[:MOST_FUNCTIONS])
    judged = row.judgment + (f": {row.cause.reason}" if row.cause else "")
    versions, since = ", ".join(row.versions), ", ".join(row.since)
    return _cells(versions, since, ", ".join(row.architectures), _changes(row.changes), functions or "-", judged)


def _changes(changes: Sequence[Change]) -> str:
    """Return kinds of changes with their sections, and the largest difference or one example."""
    sections: dict[Kind, set[str]] = defaultdict(set)
    for change in changes:
        sections[change.kind].add(str(change.section))
    listed = ", ".join(f"{kind} ({_first(sorted(found), MOST_SECTIONS)})" for kind, found in sections.items())
    if differences := [change.max_diff for change in changes if change.max_diff is not None]:
        return f"{listed}, up to {max(differences):.2g}"
    first = changes[0]
    return f"{listed}; {first.key}: {_short(first.before)} to {_short(first.after)}"


def _reported_row(one: Reported, result: Score) -> str:
    name, _, url = one.thread.rpartition(" ")
    state = "found" if one.thread in result.found else "missed" if one.thread in result.missed else "cannot be found"
    return _cells(f"[{name}]({url})", str(one.introduced), str(one.fixed or "-"), state)


def _coverage(recorded: Mapping[str, Sequence[Version]], replayed: Sequence[Version]) -> list[str]:
    """Return a table of classes by the releases on which they were recorded."""
    classes: dict[tuple[Version, ...], list[str]] = defaultdict(list)
    for name in sorted(recorded):
        classes[tuple(recorded[name])].append(name)
    lines = [
        "Each class ran on the releases in its row, and each release is compared with the one before it in the row.",
        "",
    ]
    lines += ["| classes | releases |", "|---|---|"]
    for versions, names in sorted(classes.items(), key=lambda item: (-len(item[0]), item[1])):
        which = f"all {len(replayed)}" if list(versions) == list(replayed) else ", ".join(map(str, versions))
        lines.append(_cells(", ".join(names), which))
    return lines


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _short(value: object) -> str:
    text = str(value).replace("`", "'")
    text = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    return f"`{text}`"


def _first(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
