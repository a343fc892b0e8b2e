"""Where the repository is, and where it keeps the coverage pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository."""

PAGES = ROOT / "docs" / "model-coverage"
"""The coverage pages; the recorded outcomes are in the folder `results` next to them."""
