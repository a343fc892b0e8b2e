"""Outcomes of inference engines on the page of a family, with links to their certificates."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tools.checkout import PAGES
from tools.coverage_pages.overview import table
from tools.coverage_pages.results import Kind, Records
from tools.variants import SEPARATOR

ENGINES = {"vLLM": "vllm", "vLLM with images": "vllm-images", "MLX": "mlx"}
"""The engines with a section in docs/engine-coverage.md, in order, and the names of their pages. Each engine's
environment writes its section."""

KINDS = {"vLLM": Kind.ENGINE, "vLLM with images": Kind.IMAGES, "MLX": Kind.MLX}
"""The kind of each engine's records."""

CERTIFICATES = PAGES.parent / "engine-coverage" / "certificates"


def certificate_file(engine: str, architecture: str) -> Path:
    """Return the file of an architecture's certificate. `engine` is a key of `ENGINES`."""
    name = architecture.replace(SEPARATOR, "-")  # which would end the path in a link
    return CERTIFICATES / ENGINES[engine] / f"{name}.json"


def certificate_link(engine: str, architecture: str, text: str, page: Path) -> str:
    """Return a link from a page to an architecture's certificate; empty if it has none."""
    file = certificate_file(engine, architecture)
    return f"[{text}]({Path(os.path.relpath(file, page.parent)).as_posix()})" if file.is_file() else ""


def engines_section(architectures: Iterable[str], records: Records, page: Path) -> list[str]:
    """Return the lines of a family's section: the outcome of each architecture in each engine that was tried."""

    def cell(engine: str, name: str) -> str:
        if (record := records[KINDS[engine]].get(name)) is None:
            return ""
        link = certificate_link(engine, name, "certificate", page)
        return record.outcome["status"] + (f" ({link})" if link else "")

    tried = {name: {engine: cell(engine, name) for engine in ENGINES} for name in architectures}
    tried = {name: cells for name, cells in tried.items() if any(cells.values())}
    if not tried:
        return []
    engines = [engine for engine in ENGINES if any(cells[engine] for cells in tried.values())]
    text = "Tiny models with random weights. [Engine coverage](../engine-coverage.md) explains the results."
    rows = [(name, *(cells[engine] for engine in engines)) for name, cells in tried.items()]
    return [text, "", *table(("architecture", *engines), rows)]
