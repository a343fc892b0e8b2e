"""Arguments that are paths. Has no heavy imports."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    around,
    as_path,
    checkpoints_below,
    is_gguf,
    is_local,
    resume_checkpoint_in,
    similar_checkpoint,
)
from nrl_models.errors import CheckpointError, UnknownArgumentError, details_of, visible


def any_path(text: str | Path) -> Path:
    """Parse a path, and expand `~`, which shells leave unchanged in `--json=~/FILE`.

    Raises:
        typer.BadParameter: It is empty, or no file can have that path: an unknown user, a loop of symbolic links, or a
            name that is too long.
    """
    try:
        return as_path(text)
    except UnknownArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    except CheckpointError as error:
        raise typer.BadParameter(visible(details_of(error.problems))) from error


def existing_file(text: str) -> Path:
    """Parse the path of a file to read.

    Raises:
        typer.BadParameter: See `any_path`. Also if there is no such file, or it is a directory.
    """
    if not (path := any_path(text)).exists():
        raise typer.BadParameter(f"no such file: {text}")
    if path.is_dir():
        raise typer.BadParameter(f"{text} is a directory, expected a file")
    return path


def output_directory(text: str | Path) -> Path:
    """Parse the path of a directory to write.

    Raises:
        typer.BadParameter: See `any_path`. Also if it is a file.
    """
    if (path := any_path(text)).is_file():
        raise typer.BadParameter(f"{text} is a file, expected a directory")
    return path


def checkpoint_path(text: str) -> Path:
    """Parse a checkpoint directory, a GGUF file, or a hub repository ID.

    Raises:
        typer.BadParameter: The directory does not exist, or its `config.json` is missing or damaged.
    """
    path = any_path(text)
    if path.is_file():
        if is_gguf(path):
            return path
        raise typer.BadParameter(f"{text} is a file, expected a checkpoint directory or a GGUF file{around(path)}")
    if not is_local(text):
        return path
    if not path.is_dir():
        raise typer.BadParameter(f"no such directory: {text}{similar_checkpoint(path)}")
    if os.path.lexists(path / CONFIG_NAME):  # also if it is a link to a file that does not exist
        _check_config(path / CONFIG_NAME)
    elif not (path / ADAPTER_CONFIG_NAME).exists() and not any(map(is_gguf, path.iterdir())):
        if resume := resume_checkpoint_in(path):
            raise typer.BadParameter(f"{text} {resume[0]}: {resume[1]}")
        # Loading reports adapter directories and GGUF files in more detail.
        raise typer.BadParameter(
            f"{text}: config.json is missing{checkpoints_below(path)}; expected a checkpoint directory"
        )
    return path


def config_path(text: str) -> Path:
    """Parse a checkpoint as `checkpoint_path` does, or a `config.json` file."""
    path = any_path(text)
    if path.is_file() and not is_gguf(path):
        _check_config(path)
        return path
    if is_local(text):
        _require_exists(text)
    return checkpoint_path(text)


def local_config_path(text: str) -> Path:
    """Parse a path as `config_path` does, but raise for hub repositories."""
    _require_exists(text)
    return config_path(text)


def _require_exists(text: str) -> None:
    if not (path := any_path(text)).exists():
        hint = similar_checkpoint(path, or_config=True)
        raise typer.BadParameter(f"no such file or directory: {text}{hint}")


def _check_config(file: Path) -> None:
    try:
        read_object(file)
    except CheckpointError as error:
        detail = "; ".join(problem.detail for problem in error.problems)
        raise typer.BadParameter(visible(f"{file} {detail}: expected a model configuration")) from error
