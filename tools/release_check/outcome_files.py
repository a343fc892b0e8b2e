"""JSON lines files to which outcomes are appended immediately, so that an interrupted run resumes."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class OutcomeFile:
    """A file with one outcome per line, each a JSON object.

    An incomplete line from an interruption is dropped. A later line replaces an earlier one with the same key.

    Args:
        path: The file. Created with its folder when the first outcome is added. A file `.gz` can only be read.
        key: Names of the fields that identify an outcome.
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
        """Iterate over the last outcome of each key, in the order of the keys' first lines."""
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.path.is_file():
            content = self.path.read_bytes()
            text = gzip.decompress(content) if self.path.suffix == ".gz" else content
            for line in text.decode("utf-8", errors="replace").splitlines():
                try:
                    outcome = json.loads(line)
                except ValueError:  # an incomplete line
                    continue
                if isinstance(outcome, dict) and all(name in outcome for name in self._key):
                    found[tuple(outcome[name] for name in self._key)] = outcome
        yield from found.values()


def versions_of(*packages: str) -> dict[str, str]:
    """Return installed versions by package, without packages that are not installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def source_digest(*paths: Path) -> str:
    """Return a short hash of the Python sources in these files and folders, to distinguish checkouts."""
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(file.relative_to(path.parent).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
