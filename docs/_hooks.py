"""The site has the repository's own layout, so that one link works in both: README.md is its first page."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OTHER_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples/README.md")
"""Pages that are not in docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Arrange the pages as in the repository: those of docs/ in a folder, README.md and others at the root."""
    for file in list(files):
        if (
            not (file.is_documentation_page() or file.src_uri.endswith(".svg") or "/certificates/" in file.src_uri)
            or file.generated_by
        ):
            continue
        files.remove(file)
        files.append(File.generated(config, f"docs/{file.src_uri}", abs_src_path=file.abs_src_path))
    for name in (*OTHER_PAGES, *(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*.py"))):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


BUTTONS = """
[Get started](docs/quickstart.md){ .md-button .md-button--primary }
[API reference](docs/api/index.md){ .md-button }
[Results](docs/engine-coverage.md){ .md-button }
"""
"""Links under the first paragraph of the home page."""

BOOSTS = {
    "docs/model-coverage/": 0.3,
    "docs/engine-coverage": 0.5,
    "docs/onboarding-reach": 0.5,
    "docs/benchmarks": 0.5,
    "docs/api/": 0.7,
    "docs/security.md": 0.7,
    "CHANGELOG.md": 0.2,
}
"""Weights of pages in the search, by the start of their path. Guides have 2."""


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set the page's weight in the search. Add the home page's buttons."""
    path = page.file.src_uri
    boost = next((boost for start, boost in BOOSTS.items() if path.startswith(start)), 2)
    page.meta["search"] = {"exclude": True} if path == "LICENSE" else {"boost": boost}
    if path != "README.md":
        return markdown
    page.meta["hide"] = ["navigation"]
    title, summary, rest = markdown.split("\n\n", 2)
    return "\n\n".join((title, summary, BUTTONS, rest))
