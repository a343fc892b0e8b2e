"""The overview of the coverage pages: a row for each architecture, by kind; and the rows that a reader asks for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.markup import escape
from rich.table import Table

from nrl_models.errors import NRLModelsError

FILE = "overview.json"
"""The rows as data, beside the pages."""

UNTESTED = "not tested"

Value = TypeVar("Value")


class OverviewError(NRLModelsError):
    """There is no overview, or nothing in it is called so."""


@dataclass(frozen=True)
class Row:
    """One architecture.

    Args:
        family: its page.
        architecture: its name.
        model_type: what `config.json` calls its configuration; nothing if it was not tested.
        kinds: see `nrl_models.onboarding.inspect.kinds_of`; none if it was not tested.
        features: for each feature its verdict: `yes`, `no`, `limited`, `n/a`; of sharding see `Sharded.verdicts`.
        passed: how many generated tests passed.
    """

    family: str
    architecture: str
    model_type: str
    kinds: tuple[str, ...]
    features: dict[str, str]
    passed: int


def sections(rows: Iterable[Row], features: Sequence[str]) -> list[str]:
    """A table for each kind, after links to them, as lines of Markdown."""
    by_kind = grouped((", ".join(row.kinds) or UNTESTED, row) for row in rows)
    order = sorted(by_kind, key=lambda kind: (kind == UNTESTED, kind))
    lines = [f"- [{kind}](#{kind.replace(',', '').replace(' ', '-')}): {len(by_kind[kind])}" for kind in order]
    for kind in order:
        cells = [
            (
                *(f"[{row.family}]({row.family}.md)", row.architecture, row.model_type),
                *(row.features.get(feature, "") for feature in features),
                str(row.passed),
            )
            for row in by_kind[kind]
        ]
        headings = ("family", "architecture", "model type", *features, "tests passed")
        lines += ["", f"## {kind}", "", *table(headings, cells)]
    return lines


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table as lines of Markdown."""
    return [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}", *(f"| {' | '.join(row)} |" for row in rows)]


def grouped(pairs: Iterable[tuple[str, Value]]) -> dict[str, list[Value]]:
    """The second of each pair by the first, in their order."""
    found: dict[str, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def write(rows: Iterable[Row], file: Path) -> None:
    """Write rows as JSON, a line each."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    file.write_text(f"[\n{lines}\n]\n")


def read(file: Path) -> list[Row]:
    """The rows that `write` wrote.

    Raises:
        OverviewError: there are none.
    """
    if not file.is_file():
        raise OverviewError(f"{file} is not there: run nrl-models dev coverage, or name the folder with --out")
    return [Row(**one | {"kinds": tuple(one["kinds"])}) for one in json.loads(file.read_text())]


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
            wanted[known[name]] = verdict or "yes"
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
