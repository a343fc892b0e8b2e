"""Outcomes of inference engines on the page of a family, with links to their certificates."""

from __future__ import annotations

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


def engines_section(architectures: Iterable[str], records: Records) -> list[str]:
    """Return the lines of a family's section: the outcome of each architecture in each engine that was tried."""
    tried = {name: {engine: records[kind].get(name) for engine, kind in KINDS.items()} for name in architectures}
    tried = {name: found for name, found in tried.items() if any(found.values())}
    engines = [engine for engine in ENGINES if any(found[engine] for found in tried.values())]
    rows = []
    for name, found in tried.items():
        cells = []
        for engine in engines:
            record, file = found[engine], certificate_file(engine, name)
            link = f" ([certificate](../{file.relative_to(PAGES.parent).as_posix()}))" if file.is_file() else ""
            cells.append(f"{record.outcome['status']}{link}" if record else "")
        rows.append((name, *cells))
    if not rows:
        return []
    text = "Tiny models with random weights. [Engine coverage](../engine-coverage.md) explains the results."
    return [text, "", *table(("architecture", *engines), rows)]
