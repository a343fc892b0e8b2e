"""The catalogue as tables: for the command, for `docs/quirks.md`, for a family's page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from nrl_models.quirks.catalogue import CATALOGUE
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.subject import Subject

BEGIN, END = "<!-- quirks: made by `python -m nrl_models.quirks.listing` -->", "<!-- end of quirks -->"
"""What the catalogue stands between in the guide."""


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


def as_markdown(quirks: Iterable[Quirk]) -> str:
    """A section for each quirk, as the guide has them."""
    sections = []
    for quirk in quirks:
        lines = [
            f"### {quirk.name}",
            "",
            f"{quirk.symptom} *({', '.join(quirk.where)}{'; every model' if quirk.every_model else ''})*",
            "",
            f"- Handling: {quirk.handling} In {', '.join(f'`{one}`' for one in quirk.code)}.",
            f"- Switch off: {quirk.switch}.",
            f"- Expiry: {quirk.expiry}. Then delete: {quirk.remove}.",
        ]
        lines += [f"- Told of in {', '.join(f'<{one}>' for one in quirk.sources)}."] if quirk.sources else []
        sections.append("\n".join(_wrapped(line) for line in lines))
    return "\n\n".join(sections)


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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


def write_guide(page: Path) -> None:
    """Put the catalogue into the guide, in the place of what stood there."""
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{as_markdown(CATALOGUE)}\n\n{END}{after}")


if __name__ == "__main__":
    write_guide(Path("docs/quirks.md"))
