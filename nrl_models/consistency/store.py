"""Measurements on disk, written one by one, so that an interrupted run can resume."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from nrl_models.common.checkpoint.json_reading import read_bytes
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.trust.own_folder import MARKER, claim, release
from nrl_models.consistency.cells import Cell
from nrl_models.errors import ConsistencyError, one_line

SETTINGS = "settings.json"

CHANGED_CHECKPOINT = "checkpoint: measured on another checkpoint, or its files have changed"

PURPOSE = "measurements of nrl-models consistency"

_CELL = r"\d+-\w+-\w+-\d+"
_OWN = re.compile(rf"settings\.json|report\.json|verdict-{_CELL}\.json|{_CELL}-\d+\.safetensors")
"""Names of a store's files. Other files in its directory are never deleted."""


class Store:
    """A directory with one file per cell and repeat, written as they are measured.

    Args:
        folder: The directory; created if necessary.
        settings: Settings that affect measurements. If the directory has measurements with other settings, an error is
            raised. Other settings without measurements are overwritten.
        fresh: Whether to delete earlier measurements. Other files in the directory stay.

    Raises:
        ConsistencyError: If the directory has measurements with other settings, or unrelated files.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        wanted = json.loads(json.dumps(settings))
        file = folder / SETTINGS
        if not claim(folder, PURPOSE):
            raise ConsistencyError(
                f"{folder} is not empty, and has no file {MARKER} that marks a directory of measurements: choose "
                "another directory (--out)"
            )
        if fresh:
            for path in self._own_files():
                path.unlink()
        measured = any(path.suffix == ".safetensors" for path in self._own_files())
        found = _read_json(file) if measured else wanted
        different = [
            CHANGED_CHECKPOINT if key == "checkpoint" else f"{key}: {found.get(key)!r} before, {wanted.get(key)!r} now"
            for key in sorted(found.keys() | wanted.keys())
            if found.get(key) != wanted.get(key)
        ]
        if different:
            raise ConsistencyError(
                f"{folder} holds measurements made with other settings:",
                *(f"  - {difference}" for difference in different),
                "Choose another directory (--out), or discard them (--fresh).",
            )
        write_whole(file, json.dumps(wanted, indent=1))

    def delete_if_empty(self) -> None:
        """Delete the directory if nothing was measured."""
        if not any(path.suffix == ".safetensors" for path in self._own_files()):
            (self.folder / SETTINGS).unlink(missing_ok=True)
            release(self.folder)

    def _own_files(self) -> list[Path]:
        """Return the files that this or an earlier store wrote to the directory."""
        named = [path for path in self.folder.iterdir() if _OWN.fullmatch(path.name)]
        return [path for path in named if path.is_file() or path.is_symlink()]

    def load(self, cell: Cell, repeat: int) -> dict[str, torch.Tensor]:
        """Load the saved arrays of a repeat; empty if there are none or the file is damaged."""
        try:
            return safetensors.torch.load_file(self._file(cell, repeat))
        except (SafetensorError, OSError):
            return {}

    def save(self, cell: Cell, repeat: int, arrays: Mapping[str, torch.Tensor]) -> None:
        """Save the arrays of a repeat, replacing earlier ones."""
        contiguous = {name: array.contiguous() for name, array in arrays.items()}
        write_whole(self._file(cell, repeat), safetensors.torch.save(contiguous))

    def load_note(self, name: str) -> Any:
        """Load a JSON note; None if there is none."""
        file = self.folder / f"{name}.json"
        return _read_json(file) if file.exists() else None

    def save_note(self, name: str, content: Any) -> None:
        """Write a JSON note."""
        write_whole(self.folder / f"{name}.json", json.dumps(content, indent=1))

    def _file(self, cell: Cell, repeat: int) -> Path:
        return self.folder / f"{cell.key}-{repeat}.safetensors"


def _read_json(file: Path) -> Any:
    try:
        return json.loads(read_bytes(file))
    except (ValueError, RecursionError, OSError) as error:
        raise ConsistencyError(
            f"{file} is damaged ({one_line(error)}): delete it, or start again with --fresh"
        ) from error
