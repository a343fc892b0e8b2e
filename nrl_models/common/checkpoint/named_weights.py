"""The weights that `transformers_weights` in config.json names. transformers reads them, and not model.safetensors."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown

KEY = "transformers_weights"


def named_weights(folder: Path) -> Any:
    """The file, or index of shards, that a checkpoint's configuration names; None if it names none. Unchecked."""
    try:
        return read_object(folder / CONFIG_NAME).get(KEY)
    except (CheckpointError, OSError):  # reported when the configuration is read
        return None


def is_index(named: Any) -> bool:
    """Return True if the name is that of an index of shards."""
    return isinstance(named, str) and named.endswith(".safetensors.index.json")


def leaves(file: str) -> bool:
    """Whether a name of a file leads out of the directory of the checkpoint."""
    path = PurePosixPath(file)
    return path.is_absolute() or ".." in path.parts or "\\" in file


def problem_of(named: Any) -> Problem | None:
    """Return the problem with a name of a weights file, or None."""
    if not isinstance(named, str):
        return Problem(ProblemKind.CONFIG, KEY, f"is {shown(named)}, expected the name of a file", CONFIG_NAME)
    if leaves(named):
        return Problem(ProblemKind.INDEX, KEY, f"names {named!r}, outside the checkpoint", CONFIG_NAME)
    if not named.endswith(".safetensors") and not is_index(named):
        return Problem(ProblemKind.FORMAT, KEY, f"names {named!r}, which is not safetensors", CONFIG_NAME)
    return None
