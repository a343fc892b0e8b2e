"""JSON lines that are appended as outcomes come, so that an interrupted run resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class OutcomeFile:
    """A file of outcomes, one JSON object a line.

    A line that an interruption cut short is dropped. A later line replaces an earlier one with the same key.

    Args:
        path: created with its folder when the first outcome is added.
        key: names of the fields that identify an outcome.
    """

    def __init__(self, path: Path, key: tuple[str, ...]) -> None:
        self.path = path
        self._key = key

    def add(self, outcome: Mapping[str, Any]) -> None:
        """Append an outcome and flush it to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell() and not self._ends_with_newline():
                file.write(b"\n")
            file.write(json.dumps(outcome).encode() + b"\n")

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The last outcome of each key, in the order of the keys' first lines."""
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    outcome = json.loads(line)
                except ValueError:  # cut short
                    continue
                if isinstance(outcome, dict) and all(name in outcome for name in self._key):
                    found[tuple(outcome[name] for name in self._key)] = outcome
        yield from found.values()


def versions_of(*packages: str) -> dict[str, str]:
    """Installed versions by package; packages that are not installed are left out."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def source_digest(*paths: Path) -> str:
    """A short hash of the Python sources in these files and folders, to tell two checkouts apart."""
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(file.relative_to(path.parent).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
