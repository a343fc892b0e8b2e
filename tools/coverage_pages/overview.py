"""The overview of recorded outcomes: one row per architecture, and filters by kind and feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.markup import escape
from rich.table import Table

from nrl_models.errors import NRLModelsError


class Verdict(StrEnum):
    """The verdict of a feature for one architecture, as the pages show it."""

    YES = "yes"
    LIMITED = "limited"
    RAISES = "raises"
    FAILS = "fails"
    NOT_APPLICABLE = "n/a"
    NOT_TESTED = "not tested"


class OverviewError(NRLModelsError):
    """No recorded kind, feature or verdict has this name."""


@dataclass(frozen=True)
class Row:
    """One architecture.

    Args:
        family: The family whose page lists it.
        architecture: Its name.
        model_type: `model_type` of its configuration. Empty if it was not tested.
        kinds: See `nrl_models.onboarding.inspect.kinds_of`. Empty if it was not tested.
        features: The verdict of each feature.
        passed: Number of generated tests that passed.
    """

    family: str
    architecture: str
    model_type: str
    kinds: tuple[str, ...]
    features: Mapping[str, Verdict]
    passed: int

    def with_verdict(self, *verdicts: Verdict) -> list[str]:
        """Return the features that have one of the verdicts."""
        return [feature for feature, verdict in self.features.items() if verdict in verdicts]


def overview_table(rows: Iterable[Row], trains_with: Sequence[str]) -> list[str]:
    """Format a Markdown table with one line per architecture: its kinds and trainers.

    Args:
        rows: The architectures.
        trains_with: Features to list in a separate column if their verdict is yes.
    """
    headings = ("architecture", "model type", "kind", "trains with", "tests passed")
    cells = []
    for row in rows:
        untested = all(row.features.get(name, Verdict.NOT_TESTED) == Verdict.NOT_TESTED for name in trains_with)
        trains = [feature for feature in row.with_verdict(Verdict.YES) if feature in trains_with]
        trainers = str(Verdict.NOT_TESTED) if untested else ", ".join(trains)
        kinds = ", ".join(row.kinds) or str(Verdict.NOT_TESTED)
        link = f"[{row.architecture}]({row.family}.md)"
        cells.append((link, row.model_type, kinds, trainers, str(row.passed)))
    return table(headings, cells)


def limits_table(rows: Iterable[Row]) -> list[str]:
    """Format a section with the architectures for which a feature is limited or fails. Empty if there are none."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for verdict in (Verdict.LIMITED, Verdict.FAILS):
            for feature in row.with_verdict(verdict):
                found.setdefault((feature, str(verdict)), []).append(f"[{row.architecture}]({row.family}.md)")
    cells = [(*key, ", ".join(links)) for key, links in found.items()]
    return ["## Limited features", "", *table(("feature", "verdict", "architectures"), cells), ""] if cells else []


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a table as lines of Markdown."""
    return [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}", *(f"| {' | '.join(row)} |" for row in rows)]


def chosen(rows: Sequence[Row], kinds: Sequence[str], features: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Filter rows by kinds and features. Return the rows that match all of them, and the full names of the features.

    Args:
        rows: All rows.
        kinds: Kinds, as in the rows.
        features: Feature names, case-insensitive. `name=verdict` selects another verdict than `yes`.

    Raises:
        OverviewError: No row has the kind, the feature or the verdict. The message lists the existing ones.
    """
    known_kinds = sorted({kind for row in rows for kind in row.kinds})
    known = {name.lower(): name for row in rows for name in row.features}
    verdicts = sorted({verdict for row in rows for verdict in row.features.values()})
    problems = [f"no kind {kind!r}: there are {', '.join(known_kinds)}" for kind in kinds if kind not in known_kinds]
    wanted: dict[str, str] = {}
    for text in features:
        name, _, verdict = text.lower().partition("=")
        if name not in known:
            problems.append(f"no feature {name!r}: there are {', '.join(known.values())}")
        elif verdict and verdict not in verdicts:
            problems.append(f"no verdict {verdict!r}: there are {', '.join(verdicts)}")
        else:
            wanted[known[name]] = verdict or Verdict.YES
    if problems:
        raise OverviewError("; ".join(problems))
    found = [
        row
        for row in rows
        if set(kinds) <= set(row.kinds) and all(row.features.get(name) == verdict for name, verdict in wanted.items())
    ]
    return found, list(wanted)


def as_table(rows: Sequence[Row], features: Sequence[str]) -> Table:
    """Format rows for the terminal, with some of their features."""
    count = f"{len(rows)} architecture{'' if len(rows) == 1 else 's'}"
    table = Table(title=count, title_justify="left")
    for name in ("family", "architecture", "model type", "kind", *features):
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = (row.family, row.architecture, row.model_type, ", ".join(row.kinds))
        table.add_row(*map(escape, (*cells, *(row.features.get(feature, "") for feature in features))))
    return table
