"""Real text without a download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

END = "<|endoftext|>"
"""Separates two files."""


def prose_of_this_machine() -> str:
    """Return Python's reference manual, 460,000 characters of English that are part of its standard library.

    Some distributions leave it out; then the result is `text_of_this_machine`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return text_of_this_machine()
    return "\n\n".join(topics.values())


def text_of_this_machine(limit: int = 6_000_000) -> str:
    """Return real text that exists on any machine with Python: sources and documentation of its standard library.

    Args:
        limit: Maximum number of characters.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))
    pieces, size = [], 0
    for path in files:
        piece = path.read_text(encoding="utf-8", errors="replace")
        pieces.append(piece)
        size += len(piece)
        if size >= limit:
            break
    return END.join(pieces)[:limit]
