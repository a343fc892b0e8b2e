"""Where a checkpoint is and what its configuration is called. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

from nrl_models.errors import CheckpointError, Problem, ProblemKind

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"

_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


def is_local(path_or_id: str | Path) -> bool:
    """Whether a name stands for a local checkpoint rather than for a hub repository.

    It does if it is a directory or a GGUF file, starts with `.`, `/` or `~`, has no form that a repository's name can
    have (`name` or `owner/name`), or is a path below a directory that exists.
    """
    text = str(path_or_id)
    path = Path(text).expanduser()
    return (
        text.startswith((".", "/", "~"))
        or _REPOSITORY.fullmatch(text) is None
        or path.is_dir()
        or (is_gguf(path) and path.is_file())
        or ("/" in text and path.parent.is_dir())
    )


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix.lower() == ".gguf"


def find_gguf(folder: Path, name: str | None = None) -> Path | None:
    """The GGUF file in a directory: the one called `name`, or the only one; None if there is none.

    Raises:
        CheckpointError: none of that name, or several to choose from.
    """
    found = sorted(path.name for path in folder.glob("*") if is_gguf(path))
    listed = ", ".join(found) or "none"
    if name is not None:
        if (folder / name).is_file():
            return folder / name
        problem = Problem(ProblemKind.FILE, name, f"no such file; GGUF files there: {listed}")
        raise CheckpointError(f"cannot load {folder}", [problem], ["correct gguf_file"])
    if len(found) > 1:
        problem = Problem(ProblemKind.FILE, str(folder), f"has several GGUF files: {listed}")
        advice = "give the path of one of them, or gguf_file= with its name"
        raise CheckpointError(f"cannot load {folder}", [problem], [advice])
    return folder / found[0] if found else None
