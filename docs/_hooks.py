"""The site has the repository's own layout, so that one link works in both: README.md is its first page."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples/README.md")
"""Pages that are not in docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put docs/ in a folder of its own, as in the repository, and the pages beside it where they are there."""
    for file in list(files):
        if not (file.is_documentation_page() or file.src_uri.endswith(".svg")) or file.generated_by:
            continue
        files.remove(file)
        files.append(File.generated(config, f"docs/{file.src_uri}", abs_src_path=file.abs_src_path))
    for name in (*BESIDE, *(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*.py"))):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files
