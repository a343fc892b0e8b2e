"""The report of a release check: Markdown, JSON, and a table for the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from tools.release_check.findings import Cause, Kind
from tools.release_check.run import Report

TITLES = {
    Kind.MISSING_NAME: "{subject} does not exist",
    Kind.RENAMED_PARAMETER: "{subject}: parameter {detail} was renamed or removed",
    Kind.MOVED_PARAMETER: "{subject}: parameter {detail} has another position",
    Kind.CHANGED_CALL: "a call of {subject} no longer fits its signature ({detail})",
    Kind.MISSING_FIELD: "{subject} has no field {detail}",
    Kind.SWALLOWED_KEYWORD: "keyword {subject} is dropped without an error; its name is now {detail}",
    Kind.EXCEPTION: "{detail} in {subject}",
    Kind.DIFFERENCE: "{subject}: results differ ({detail})",
    Kind.CHANGED_NUMBERS: "{subject}: {detail} changed upstream",
    Kind.CHANGED_CLASSES: "{subject}: {detail}",
    Kind.EXPIRED_QUIRK: "quirk {subject} is not as the catalog says",
    Kind.CONFLICT: "packages do not go together: {subject} ({detail})",
    Kind.NOT_ONBOARDED: "new model {subject} cannot be onboarded ({detail})",
    Kind.NOT_SERVED: "model type {subject} does not load ({detail})",
}
"""Titles of causes by kind."""

MOST_FINDINGS, MOST_DIFFS = 12, 4


def title(cause: Cause) -> str:
    """Return a one-line title of a cause."""
    return TITLES[cause.kind].format(subject=cause.subject, detail=cause.detail)


def write_report(report: Report, out: Path) -> Path:
    """Write `report.md` and `report.json` to a folder. Returns the path of the former."""
    (out / "report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    path = out / "report.md"
    path.write_text(markdown(report))
    return path


def markdown(report: Report) -> str:
    """Format the report as a page."""
    lines = ["# Release check", "", "| package | tested | judged |", "|---|---|---|"]
    for name, version in report.versions.items():
        note = " (names only: its wheel is large)" if name in report.names_only else ""
        lines.append(f"| {name} | {report.tested.get(name, '-')} | {version}{note} |")
    for heading, entries in (
        ("Phases", report.phases),
        ("Phases with nothing to check", report.skipped),
        ("Not judged", report.errors),
    ):
        if entries:
            lines += ["", f"{heading}:", "", *(f"- {entry}" for entry in entries)]
    lines += ["", f"{_number_of_causes(report)}." if report.phases or report.causes else "Nothing was checked."]
    for cause in report.causes:
        lines += ["", f"## {title(cause)}", "", cause_markdown(cause, report.diffs)]
    return "\n".join([*lines, ""])


def _number_of_causes(report: Report) -> str:
    """Return the number of causes, for example `2 causes`."""
    return f"{len(report.causes)} cause{'s' * (len(report.causes) != 1)}"


def cause_markdown(cause: Cause, diffs: dict[str, str]) -> str:
    """Format a cause: affected classes, findings, and upstream's change."""
    lines = [f"Cause `{cause.id}`, found by: {', '.join(cause.phases)}."]
    if cause.architectures:
        lines += ["", f"Architectures ({len(cause.architectures)}): {', '.join(cause.architectures)}."]
    shown = cause.findings[:MOST_FINDINGS]
    lines += ["", *(f"- {finding.message}" for finding in shown)]
    if len(cause.findings) > len(shown):
        lines.append(f"- and {len(cause.findings) - len(shown)} more")
    changed = [name for name in cause.functions if name in diffs]
    for name in changed[:MOST_DIFFS]:
        lines += ["", f"Upstream's change of `{name}`:", "", "```diff", diffs[name], "```"]
    if len(changed) > MOST_DIFFS:
        lines += ["", f"Also changed: {', '.join(f'`{name}`' for name in changed[MOST_DIFFS:])}."]
    return "\n".join(lines)


def table(report: Report) -> Table:
    """Format the causes for the terminal."""
    found = Table(title=_number_of_causes(report), title_justify="left")
    for column in ("id", "cause", "architectures", "findings", "phases", "upstream diff"):
        found.add_column(column, overflow="fold")
    for cause in report.causes:
        changed = sum(name in report.diffs for name in cause.functions)
        names = ", ".join(cause.architectures[:3]) + (" ..." if len(cause.architectures) > 3 else "")
        found.add_row(
            cause.id,
            title(cause),
            f"{len(cause.architectures)}: {names}" if names else "",
            str(len(cause.findings)),
            ", ".join(cause.phases),
            str(changed) if changed else "",
        )
    return found
