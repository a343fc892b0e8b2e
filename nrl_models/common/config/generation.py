"""Read the generation settings of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import GENERATION_NAME
from nrl_models.errors import CheckpointError, Problem, ProblemKind, one_line


def generation_settings(folder: Path) -> GenerationConfig | None:
    """Read a checkpoint's generation_config.json; None if it has none.

    Raises:
        CheckpointError: If the file is not a regular file or not a JSON object, or transformers rejects its values.
    """
    file = folder / GENERATION_NAME
    if not file.exists():
        return None
    read_object(file)
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # any error of its checks and conversions
        problem = Problem(ProblemKind.CONFIG, GENERATION_NAME, one_line(error))
        advice = f"correct {GENERATION_NAME}, or remove it: defaults follow from config.json then"
        raise CheckpointError(f"cannot load {folder}", [problem], [advice]) from error
