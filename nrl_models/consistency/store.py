"""Measurements on disk, written one by one, so that an interrupted run can resume."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from nrl_models.common.checkpoint.json_reading import read_bytes
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.trust.own_folder import claim, release, why_not_claimed
from nrl_models.consistency.cells import Cell
from nrl_models.errors import ConsistencyError, one_line

SETTINGS = "settings.json"

CHANGED_CHECKPOINT = "checkpoint: measured on another checkpoint, or its files have changed"

PURPOSE = "measurements of nrl-models consistency"

_CELL = r"\d+-\w+-\w+-\d+"
ENGINE = "engine"
"""Name of the note that describes the engine."""

_OWN = re.compile(rf"settings\.json|report\.json|engine\.json|verdict-{_CELL}\.json|{_CELL}-\d+\.safetensors")
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
            raise ConsistencyError(why_not_claimed(folder))
        if fresh:
            for path in self._own_files():
                path.unlink()
        self._require_same(_read_json(file) if self.has_measurements else wanted, wanted)
        write_whole(file, json.dumps(wanted, indent=1))

    @property
    def has_measurements(self) -> bool:
        """Whether at least one repeat was measured."""
        return any(path.suffix == ".safetensors" for path in self._own_files())

    def note_engine(self, described: Mapping[str, Any]) -> None:
        """Note the engine that measures from now on.

        Args:
            described: See `Engine.describe`.

        Raises:
            ConsistencyError: If the directory has measurements of an engine with another description.
        """
        wanted = json.loads(json.dumps(described, default=str))
        if self.has_measurements:
            self._require_same({ENGINE: self.load_note(ENGINE)}, {ENGINE: wanted})
        self.save_note(ENGINE, wanted)

    def _require_same(self, saved_settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        if different := list(_differences(saved_settings, wanted)):
            raise ConsistencyError(
                f"{self.folder} holds measurements made with other settings:",
                *(f"  - {difference}" for difference in different),
                "Choose another directory (--out), or discard them (--fresh).",
            )

    def delete_if_empty(self) -> None:
        """Delete the directory if nothing was measured."""
        if not self.has_measurements:
            for name in (SETTINGS, f"{ENGINE}.json"):
                (self.folder / name).unlink(missing_ok=True)
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


def _differences(saved_settings: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line per setting that differs, also inside of versions and descriptions."""
    for key in sorted(saved_settings.keys() | wanted.keys()):
        before, now = saved_settings.get(key), wanted.get(key)
        if before == now:
            continue
        if key == "checkpoint":
            yield CHANGED_CHECKPOINT
        elif isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {before!r} before, {now!r} now"


def _read_json(file: Path) -> Any:
    try:
        return json.loads(read_bytes(file))
    except (ValueError, RecursionError, OSError) as error:
        raise ConsistencyError(
            f"{file} is damaged ({one_line(error)}): delete it, or start again with --fresh"
        ) from error
