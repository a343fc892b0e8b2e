"""The page of changes between releases of transformers, `docs/upstream-changes.md`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from packaging.version import Version

from tools.release_check.numbers.changes import ChangeGroup
from tools.release_check.reported import Reported, Score, judgment_of

MOST_NAMES, MOST_FUNCTIONS, MOST_CHARACTERS = 4, 2, 60


def page(
    groups: Sequence[ChangeGroup],
    judgments: Mapping[str, Mapping[str, str]],
    result: Score,
    replayed: Sequence[Version],
    recorded: Mapping[str, Sequence[Version]],
    reported: Sequence[Reported],
) -> str:
    """Return the page of changes.

    Args:
        groups: Changes of all releases.
        judgments: Judgments by the key of a group.
        result: The score.
        replayed: Releases in order.
        recorded: Releases on which a class was recorded, by class.
        reported: Reported regressions.
    """
    counts = Counter(judgment_of(group, judgments) for group in groups)
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
        f"- {len(groups)} changes: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items())) or 'none'}",
        f"- reported regressions found: {share(result.recall)} "
        f"({len(result.found)} of {visible}; {len(result.unseen)} others cannot be found by this replay: they need a "
        "GPU, or start and end outside these releases)",
        f"- false alarms: {share(result.false_alarm_rate)} ({result.false_alarms} of {result.alarms})",
        "",
        "The checks were written after these reports. So the share of regressions found does not predict how many "
        "unknown regressions they find. A change counts as a false alarm if its judgment says so, or if it has no "
        "judgment and no function that the class uses differs.",
        "",
        "## Changes",
        "",
        "A change appears under the first release in which it was recorded. The column `upstream` lists functions that "
        "differ between the two compared releases, the most likely cause first.",
        "",
        "| release | compared with | classes | change | upstream | judgment |",
        "|---|---|---|---|---|---|",
        *(_row(group, judgments) for group in groups),
        "",
        "## Reported regressions",
        "",
        "| report | starts | ends | result |",
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


def _row(group: ChangeGroup, judgments: Mapping[str, Mapping[str, str]]) -> str:
    first = group.changes[0]
    amount = f", up to {group.max_diff:.2g}" if group.max_diff is not None else ""
    sections = ", ".join(sorted({str(change.section) for change in group.changes}))
    example = "" if group.max_diff is not None else f"; {first.key}: {_short(first.before)} to {_short(first.after)}"
    functions = "<br>".join(f"`{name.removeprefix('transformers.')}`" for name in group.functions[:MOST_FUNCTIONS])
    reason = judgments.get(group.key, {}).get("reason", "")
    judged = judgment_of(group, judgments) + (f": {reason}" if reason else "")
    changed = f"{group.fact} ({sections}){amount}{example}"
    return _cells(group.version, group.since, _names(group.architectures), changed, functions or "-", judged)


def _reported_row(one: Reported, result: Score) -> str:
    name, _, url = one.thread.rpartition(" ")
    state = "found" if one.thread in result.found else "missed" if one.thread in result.missed else "cannot be found"
    return _cells(f"[{name}]({url})", str(one.introduced), str(one.fixed or "-"), state)


def _coverage(recorded: Mapping[str, Sequence[Version]], replayed: Sequence[Version]) -> list[str]:
    """Return a table of classes by the releases on which they were recorded."""
    classes: dict[tuple[Version, ...], list[str]] = defaultdict(list)
    for name in sorted(recorded):
        classes[tuple(recorded[name])].append(name)
    lines = ["A class that a release lacks is compared with the last release before it.", ""]
    lines += ["| classes | releases |", "|---|---|"]
    for versions, names in sorted(classes.items(), key=lambda item: (-len(item[0]), item[1])):
        which = f"all {len(replayed)}" if list(versions) == list(replayed) else ", ".join(map(str, versions))
        lines.append(_cells(", ".join(names), which))
    return lines


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _short(value: object) -> str:
    text = str(value)
    text = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    return f"`{text}`"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
