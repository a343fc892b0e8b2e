"""Other models and files that a checkpoint's configuration names: transformers and timm would load them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown

TIMM_FILES = ("cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")
"""Arguments of `timm.create_model` that read or download a file. timm also opens pickles."""

TIMM_NAMES = ("architecture", "backbone")
"""Keys with the name of a timm model. `hf-hub:` and `local-dir:` before the name read a repository or directory."""

PROCESSOR_FILES = ("processor_config.json", "audio_tokenizer_config.json")
"""Files in which transformers finds the audio tokenizer of a processor."""


def refuse_timm_files(values: Mapping[str, Any], where: Path) -> None:
    """Raise if a configuration's timm model would be built from other files, which may be pickles.

    Args:
        values: Contents of the configuration's file, including nested configurations.
        where: The file.

    Raises:
        CheckpointError: Lists every such key.
    """
    if problems := list(_timm_files(values, "", where.name)):
        advice = "remove them: the weights are those of the checkpoint"
        raise CheckpointError(f"cannot load {where.parent}", problems, [advice])


def _timm_files(values: Mapping[str, Any], prefix: str, file: str) -> Iterator[Problem]:
    for key, value in values.items():
        for nested in value if isinstance(value, list) else (value,):
            if isinstance(nested, Mapping):
                yield from _timm_files(nested, f"{prefix}{key}.", file)
        if key in TIMM_NAMES and isinstance(value, str) and ":" in value:
            detail = f"is {shown(value)}, a timm model outside the checkpoint"
            yield Problem(ProblemKind.CONFIG, f"{prefix}{key}", detail, file)
    if not isinstance(arguments := values.get("model_args"), Mapping):
        return
    for key in TIMM_FILES:
        if arguments.get(key):
            detail = f"is {shown(arguments[key])}, which timm would read"
            yield Problem(ProblemKind.CONFIG, f"{prefix}model_args.{key}", detail, file)


def refuse_audio_tokenizer(folder: Path) -> None:
    """Raise if the processor in a directory names a model as audio tokenizer, which transformers would load.

    Raises:
        CheckpointError: If it does. Such a model is in another directory or repository, and may be a pickle.
    """
    for name in PROCESSOR_FILES:
        if not (folder / name).is_file():
            continue
        content = read_object(folder / name)
        named = content.get("audio_tokenizer") if name == PROCESSOR_FILES[0] else content
        if named:
            detail = f"names another model, which the processor would load: {shown(named)}"
            problem = Problem(ProblemKind.FILE, "audio_tokenizer", detail, name)
            advice = "load the processor with transformers, if you trust that model"
            raise CheckpointError(f"cannot load the processor in {folder}", [problem], [advice])
