"""What a command printed, as text to compare."""

from __future__ import annotations


def unframed(text: str) -> str:
    """Printed text on one line, without the frames of boxes: where its lines wrap depends on the terminal."""
    return " ".join(text.replace("│", " ").split())
