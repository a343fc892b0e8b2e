"""Writes the catalogue of quirks into `docs/quirks.md`: `python -m tests.quirk_guide`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from nrl_models.quirks.catalogue import CATALOGUE
from nrl_models.quirks.quirk import Quirk
from tests.quirk_removals import REMOVE

BEGIN, END = "<!-- quirks: made by `python -m tests.quirk_guide` -->", "<!-- end of quirks -->"
"""The marks around the catalogue in the guide."""


def as_markdown(quirks: Iterable[Quirk]) -> str:
    """A section for each quirk, as the guide has them."""
    sections = []
    for quirk in quirks:
        lines = [
            f"### {quirk.name}",
            "",
            f"{quirk.symptom} *({', '.join(quirk.where)}{'; every model' if quirk.every_model else ''})*",
            "",
            f"- Handling: {quirk.handling} In {', '.join(f'`{place}`' for place in quirk.code)}.",
            f"- Switch off: {quirk.switch}.",
            f"- Expiry: {quirk.expiry}. Then delete: {REMOVE[quirk.name]}.",
        ]
        lines += [f"- Reported in {', '.join(f'<{source}>' for source in quirk.sources)}."] if quirk.sources else []
        sections.append("\n".join(_wrapped(line) for line in lines))
    return "\n\n".join(sections)


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def write_guide(page: Path) -> None:
    """Replace the catalogue in the guide."""
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{as_markdown(CATALOGUE)}\n\n{END}{after}")


if __name__ == "__main__":
    write_guide(Path(__file__).parents[1] / "docs" / "quirks.md")
