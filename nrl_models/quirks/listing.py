"""The catalogue as a table and as JSON, for the command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from nrl_models.quirks.catalogue import CATALOGUE
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.subject import Subject


def quirks_of(subject: Subject | None = None) -> list[Quirk]:
    """The quirks that concern a model; without a model, all."""
    return [quirk for quirk in CATALOGUE if subject is None or quirk.applies(subject)]


def as_json(quirks: Iterable[Quirk], subject: Subject | None = None) -> dict[str, Any]:
    """`{"architecture", "quirks": [{"name", "where", "symptom", ...}]}`."""
    copied = ("name", "symptom", "where", "handling", "code", "expiry", "every_model", "sources")
    found = [
        {key: getattr(quirk, key) for key in copied}
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
