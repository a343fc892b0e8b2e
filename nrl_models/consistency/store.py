"""Measurements on disk, written as they are made: an interrupted run resumes where it stopped."""

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
from nrl_models.common.trust.own_folder import MARKER, claim
from nrl_models.consistency.cells import Cell
from nrl_models.errors import ConsistencyError, one_line

SETTINGS = "settings.json"

PURPOSE = "measurements of nrl-models consistency"

_CELL = r"\d+-\w+-\w+-\d+"
_OWN = re.compile(rf"settings\.json|report\.json|verdict-{_CELL}\.json|{_CELL}-\d+\.safetensors")
"""What a store writes. Whatever else is in its directory is somebody else's, and stays."""


class Store:
    """A directory with a file for each cell and repeat, written step by step.

    Args:
        folder: created if need be.
        settings: those that measurements depend on. A directory with measurements of other settings is refused; other
            settings of which nothing was measured are replaced.
        fresh: whether to discard earlier measurements; other files in the directory stay.

    Raises:
        ConsistencyError: the directory holds measurements made with other settings, or something else.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        wanted = json.loads(json.dumps(settings))
        file = folder / SETTINGS
        if not claim(folder, PURPOSE):
            raise ConsistencyError(
                f"{folder} is not empty, and no file {MARKER} in it says that measurements are kept there: choose "
                "another directory (--out)"
            )
        if fresh:
            for path in self._own_files():
                path.unlink()
        measured = any(path.suffix == ".safetensors" for path in self._own_files())
        found = _read_json(file) if measured else wanted
        different = [
            f"{key}: {found.get(key)!r} there, {wanted.get(key)!r} now"
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

    def _own_files(self) -> list[Path]:
        """What this store, or an earlier one of its directory, wrote."""
        named = [path for path in self.folder.iterdir() if _OWN.fullmatch(path.name)]
        return [path for path in named if path.is_file() or path.is_symlink()]

    def load(self, cell: Cell, repeat: int) -> dict[str, torch.Tensor]:
        """What is there of one repeat of a cell; empty if nothing is, or if the file is damaged."""
        try:
            return safetensors.torch.load_file(self._file(cell, repeat))
        except (SafetensorError, OSError):
            return {}

    def save(self, cell: Cell, repeat: int, arrays: Mapping[str, torch.Tensor]) -> None:
        """Write what is known of one repeat of a cell, replacing what was there."""
        contiguous = {name: array.contiguous() for name, array in arrays.items()}
        write_whole(self._file(cell, repeat), safetensors.torch.save(contiguous))

    def load_note(self, name: str) -> Any:
        """A JSON note; None if there is none."""
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
