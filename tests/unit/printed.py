"""Compare the printed output of commands."""

from __future__ import annotations


def unframed(text: str) -> str:
    """Return printed text on one line, without box frames, because line breaks depend on the terminal."""
    return " ".join(text.replace("│", " ").split())
