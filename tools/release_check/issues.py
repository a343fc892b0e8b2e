"""Open an issue for each cause of a release check, or update its open issue.

    python -m tools.release_check.issues release-check/report.json

Uses GitHub's command line (`gh`). The cause's id in the title identifies the issue.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.release_check.errors import ReleaseCheckError
from tools.release_check.findings import Cause, Finding, Kind
from tools.release_check.report import cause_markdown, title

LABEL = "release-check"
LONGEST = 60_000
"""Maximum length of an issue's text. GitHub accepts 65,536 characters."""

Run = Callable[[Sequence[str]], str]


def gh(arguments: Sequence[str]) -> str:
    """Run GitHub's command line and return its output.

    Raises:
        ReleaseCheckError: It fails, or is not installed.
    """
    try:
        done = subprocess.run(["gh", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ReleaseCheckError("gh: not installed. See https://cli.github.com") from error
    if done.returncode:
        raise ReleaseCheckError(f"gh {arguments[0]} {arguments[1]}: {done.stderr.strip() or 'no message'}")
    return done.stdout


def update_issues(report: Mapping[str, Any], run: Run = gh) -> list[str]:
    """Open or update an issue for each cause.

    Args:
        report: The content of `report.json`.
        run: Runs GitHub's command line.

    Returns:
        A line for each cause that describes the action.
    """
    run(["label", "create", LABEL, "--force", "--description", "Found by the daily release check"])
    listed = run(["issue", "list", "--label", LABEL, "--state", "open", "--limit", "1000", "--json", "number,title"])
    numbers = {issue["title"].partition(" ")[0]: str(issue["number"]) for issue in json.loads(listed)}
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    done = []
    for values in report["causes"]:
        cause = Cause(
            Kind(values["kind"]),
            values["subject"],
            values["detail"],
            [Finding.from_json(finding) for finding in values["findings"]],
        )
        body = f"Found with {versions}.\n\n{cause_markdown(cause, report['diffs'])}"[:LONGEST]
        mark = f"[{cause.id}]"
        if number := numbers.get(mark):
            run(["issue", "edit", number, "--body", body])
            done.append(f"updated #{number}: {title(cause)}")
        else:
            run(["issue", "create", "--label", LABEL, "--title", f"{mark} {title(cause)}"[:250], "--body", body])
            done.append(f"opened: {title(cause)}")
    return done


def main(report: Annotated[Path, typer.Argument(help="The report.json of a release check.")]) -> None:
    """Open or update an issue for each cause of a release check."""
    try:
        for line in update_issues(json.loads(report.read_text())):
            print(line)
    except (OSError, ValueError, ReleaseCheckError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
