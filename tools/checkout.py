"""Paths of the repository and of the coverage pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository root."""

PAGES = ROOT / "docs" / "model-coverage"
"""The coverage pages. The recorded outcomes are in their subfolder `results`."""
