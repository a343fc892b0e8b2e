"""The catalogue as tables: for the command, and for a family's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from nrl_models.quirks.catalogue import CATALOGUE
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.subject import Subject


def quirks_of(subject: Subject | None = None) -> list[Quirk]:
    """The quirks that concern a model; without one, all."""
    return [quirk for quirk in CATALOGUE if subject is None or quirk.applies(subject)]


def as_json(quirks: Iterable[Quirk], subject: Subject | None = None) -> dict[str, Any]:
    """`{"architecture", "quirks": [{"name", "where", "symptom", ...}]}`."""
    as_it_is = ("name", "symptom", "where", "handling", "code", "expiry", "every_model", "sources")
    found = [
        {key: getattr(quirk, key) for key in as_it_is}
        | {"off": quirk.switch, "fixed": quirk.fixed or None, "fixed_here": quirk.is_fixed}
        | {"probe": quirk.probe or None}
        for quirk in quirks
    ]
    return {"architecture": None if subject is None else type(subject.model).__name__, "quirks": found}


def as_table(quirks: Sequence[Quirk], title: str) -> Table:
    """A row for each quirk."""
    table = Table(title=escape(title), title_justify="left", show_lines=True)
    for name in ("quirk", "where", "symptom", "handling", "switch off", "expiry"):
        table.add_column(name, overflow="fold")
    for quirk in quirks:
        cells = (
            quirk.name, ", ".join(quirk.where), quirk.symptom, quirk.handling, quirk.switch, quirk.expiry
        )  # fmt: skip
        table.add_row(*map(escape, cells))
    return table


def page_lines(subjects: dict[str, Subject]) -> list[str]:
    """What a family's coverage page says of quirks: those that concern its architectures and not every model.

    Args:
        subjects: by architecture.
    """
    lines = []
    for quirk in CATALOGUE:
        names = [name for name, subject in subjects.items() if not quirk.every_model and quirk.applies(subject)]
        if names:
            of = "" if len(names) == len(subjects) else f" ({', '.join(names)})"
            lines.append(f"- [{quirk.name}](../quirks.md#{quirk.name}){of}: {quirk.symptom} Expiry: {quirk.expiry}.")
    return lines or ["None but those of every model."]
