"""The overview of what is recorded: a row for each architecture, and the rows that a reader asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.markup import escape
from rich.table import Table

from nrl_models.errors import NRLModelsError


class Verdict(StrEnum):
    """What the pages say of a feature of an architecture."""

    YES = "yes"
    LIMITED = "limited"
    REFUSED = "refused"
    FAILS = "fails"
    NOT_APPLICABLE = "n/a"
    NOT_TESTED = "not tested"


class OverviewError(NRLModelsError):
    """Nothing that is recorded is called so."""


@dataclass(frozen=True)
class Row:
    """One architecture.

    Args:
        family: its page.
        architecture: its name.
        model_type: what `config.json` calls its configuration; nothing if it was not tested.
        kinds: see `nrl_models.onboarding.inspect.kinds_of`; none if it was not tested.
        features: for each feature its verdict.
        passed: how many generated tests passed.
    """

    family: str
    architecture: str
    model_type: str
    kinds: tuple[str, ...]
    features: Mapping[str, Verdict]
    passed: int

    def with_verdict(self, *verdicts: Verdict) -> list[str]:
        """The features that have one of some verdicts."""
        return [feature for feature, verdict in self.features.items() if verdict in verdicts]


def overview_table(rows: Iterable[Row], trains_with: Sequence[str]) -> list[str]:
    """A line of Markdown for each architecture: what it is, what it lacks, what trains it.

    Args:
        rows: the architectures.
        trains_with: the features that stand in a column of their own where the verdict is yes.
    """
    headings = ("architecture", "model type", "kind", "limited", "trains with", "tests passed")
    cells = []
    for row in rows:
        limited = row.with_verdict(Verdict.LIMITED, Verdict.FAILS)
        trains = [feature for feature in row.with_verdict(Verdict.YES) if feature in trains_with]
        kinds = ", ".join(row.kinds) or str(Verdict.NOT_TESTED)
        link = f"[{row.architecture}]({row.family}.md)"
        cells.append((link, row.model_type, kinds, ", ".join(limited), ", ".join(trains), str(row.passed)))
    return table(headings, cells)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table as lines of Markdown."""
    return [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}", *(f"| {' | '.join(row)} |" for row in rows)]


def chosen(rows: Sequence[Row], kinds: Sequence[str], features: Sequence[str]) -> tuple[list[Row], list[str]]:
    """The rows that are of every kind given and have every feature given, and the features' names.

    Args:
        rows: all.
        kinds: as they are in rows.
        features: names, in any case; `name=verdict` for another verdict than `yes`.

    Raises:
        OverviewError: no row knows the kind, the feature, or the verdict; with those there are.
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
    """Rows for the terminal, with some of their features."""
    count = f"{len(rows)} architecture{'' if len(rows) == 1 else 's'}"
    table = Table(title=count, title_justify="left")
    for name in ("family", "architecture", "model type", "kind", *features):
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = (row.family, row.architecture, row.model_type, ", ".join(row.kinds))
        table.add_row(*map(escape, (*cells, *(row.features.get(feature, "") for feature in features))))
    return table
