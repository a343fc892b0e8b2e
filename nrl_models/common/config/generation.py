"""Read the generation settings of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME
from nrl_models.errors import CheckpointError, Problem, ProblemKind, one_line


def generation_settings(folder: Path) -> GenerationConfig | None:
    """Read a checkpoint's generation_config.json; None if it has none.

    Raises:
        CheckpointError: If the file is not a regular file or not a JSON object, or transformers rejects its values.
    """
    advice = f"correct {GENERATION_NAME}, or remove it: defaults follow from config.json then"
    return _read(folder, GENERATION_NAME, lambda content: GenerationConfig.from_pretrained(folder), advice)


def add_settings_of_config(generation: GenerationConfig, folder: Path) -> None:
    """Set what `generation` leaves out to the values in a checkpoint's config.json, if it has one.

    transformers 4 wrote generation settings (`num_beams`, `forced_bos_token_id`, ...) to config.json. Configurations
    of transformers 5 drop them, and its `from_pretrained` reads them from the file.

    Args:
        generation: The settings that follow from a model's configuration, for a checkpoint without
            generation_config.json. They change in place.
        folder: Directory of the checkpoint.

    Raises:
        CheckpointError: See `generation_settings`.
    """
    stated = _read(folder, CONFIG_NAME, GenerationConfig.from_model_config, f"correct {CONFIG_NAME}")
    defaults = GenerationConfig()
    for name, value in stated.to_diff_dict().items() if stated is not None else ():
        if hasattr(defaults, name) and getattr(generation, name, None) == getattr(defaults, name):
            setattr(generation, name, value)


def _read(
    folder: Path, name: str, convert: Callable[[dict[str, Any]], GenerationConfig], advice: str
) -> GenerationConfig | None:
    file = folder / name
    if not file.exists():
        return None
    content = read_object(file)
    try:
        return convert(content)
    except Exception as error:  # any error of transformers' checks and conversions
        raise CheckpointError(
            f"cannot load {folder}", [Problem(ProblemKind.CONFIG, name, one_line(error))], [advice]
        ) from error
