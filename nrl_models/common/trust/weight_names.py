"""Check that an engine that finds weights by the names of files reads those of the checkpoint."""

from __future__ import annotations

from pathlib import Path

from nrl_models.common.checkpoint.files import require_readable
from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.common.checkpoint.named_weights import KEY, named_weights
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown


def require_standard_names(folder: Path, reader: str, pattern: str | None = None) -> None:
    """Check that a program that finds weights by the names of files reads those of the checkpoint.

    Args:
        folder: Directory of the checkpoint.
        reader: Name of the program, for the message.
        pattern: Pattern of all files that it reads; None if it follows the index.

    Raises:
        CheckpointError: If `config.json` names other weights, or further files match `pattern`. Also see
            `require_readable`.
    """
    problems = []
    if (named := named_weights(folder)) is not None:
        detail = f"is {shown(named)}, and {reader} ignores this key and reads files by their names"
        problems.append(Problem(ProblemKind.CONFIG, KEY, detail, CONFIG_NAME))
    elif pattern is not None:
        seen = require_readable(folder)
        others = sorted(path.name for path in folder.glob(pattern) if path.name not in seen)
        detail = f"is not part of the checkpoint, and {reader} reads it, because it reads all {pattern}"
        problems += [Problem(ProblemKind.FILE, name, detail) for name in others]
    if problems:
        advice = f"write the checkpoint with `nrl-models convert {folder} DIR`, and start {reader} on DIR"
        raise CheckpointError(f"{reader} would load other weights than {folder} has", problems, [advice])
