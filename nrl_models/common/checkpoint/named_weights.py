"""The weights that `transformers_weights` in config.json names. transformers reads them, and not model.safetensors."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.errors import CheckpointError, Problem, ProblemKind

KEY = "transformers_weights"


def named_weights(folder: Path) -> str | None:
    """The file, or index of shards, that a checkpoint's configuration names; None if it names none."""
    try:
        named = read_object(folder / CONFIG_NAME).get(KEY)
    except (CheckpointError, OSError):  # reported when the configuration is read
        return None
    return named if isinstance(named, str) else None


def is_index(named: str) -> bool:
    """Whether the name is that of an index of shards."""
    return named.endswith(".safetensors.index.json")


def leaves(file: str) -> bool:
    """Whether a name of a file leads out of the directory of the checkpoint."""
    path = PurePosixPath(file)
    return path.is_absolute() or ".." in path.parts or "\\" in file


def problem_of(named: str) -> Problem | None:
    """What is wrong with the name of weights."""
    if leaves(named):
        return Problem(ProblemKind.INDEX, KEY, f"names {named!r}, outside the checkpoint", CONFIG_NAME)
    if not named.endswith(".safetensors") and not is_index(named):
        return Problem(ProblemKind.FORMAT, KEY, f"names {named!r}, which is not safetensors", CONFIG_NAME)
    return None
