"""Directories that this library keeps something in: it deletes and replaces only what is in these, by its own names."""

from __future__ import annotations

from pathlib import Path

MARKER = ".nrl_models"
"""The file in such a directory that says what it is for."""


def claim(folder: Path, purpose: str) -> bool:
    """Make `folder` one that this library keeps something in.

    Args:
        folder: created if need be.
        purpose: what it keeps, in a few words.

    Returns:
        Whether it is one now, or was: a directory that is new, empty, or marked for that purpose. Any other is
        somebody else's, and nothing in it has been touched.
    """
    marker = folder / MARKER
    if marker.is_file():
        return marker.read_text(errors="replace").strip() == purpose
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(purpose + "\n")
    return True
