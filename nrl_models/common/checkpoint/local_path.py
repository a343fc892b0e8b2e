"""Locate a checkpoint, its configuration, and the cache directory. Has no heavy imports."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath

from nrl_models.errors import (
    CheckpointError,
    Problem,
    ProblemKind,
    UnknownArgumentError,
    did_you_mean,
    shown,
    suggestion,
)

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
MANIFEST_NAME = "manifest.json"
"""The file of a resume checkpoint's version that lists the other files."""
VERSION = re.compile(r"version-([1-9]\d{0,17})")
"""Names of the versions in a resume checkpoint."""

CACHE_VARIABLE = "NRL_MODELS_CACHE"
"""The environment variable with the directory for downloads and results."""

_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


def as_path(path_or_id: str | os.PathLike[str]) -> Path:
    """Return a path or the name of a hub repository as a path, with `~` expanded.

    Raises:
        UnknownArgumentError: If it is neither a string nor a path, or empty.
        CheckpointError: If no file can have that path: a null byte, an unknown user, a loop of symbolic links, or too
            many characters. Also if a directory that contains it may not be read.
    """
    if not isinstance(path_or_id, str | os.PathLike) or not isinstance(os.fspath(path_or_id), str):
        raise UnknownArgumentError(f"{shown(path_or_id)}: expected a directory, a file or the name of a hub repository")
    if not os.fspath(path_or_id):
        raise UnknownArgumentError("the path is empty: pass '.' for the current directory")
    try:
        path = Path(path_or_id).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
    except PermissionError as error:
        raise not_permitted(path, error) from error
    except (OSError, RuntimeError, ValueError) as error:
        detail = f"is not a path: {getattr(error, 'strerror', None) or error}"
        problem = Problem(ProblemKind.FILE, shown(str(path_or_id)), detail)
        raise CheckpointError("cannot load a checkpoint", [problem], ["correct the path"]) from error
    return path


def not_permitted(path: Path, error: PermissionError) -> CheckpointError:
    """Return the error for a directory or file that may not be read."""
    problem = Problem(ProblemKind.FILE, str(error.filename or path), f"cannot be read: {error.strerror}")
    return CheckpointError(f"cannot load {path}", [problem], ["check the permissions of the file and its directories"])


def is_local(path_or_id: str | Path) -> bool:
    """Return True if a string is a local path rather than a hub repository.

    It is a local path if it is a directory or a GGUF file, starts with `.`, `/` or `~`, is not a valid repository name
    (`name` or `owner/name`), or is a path below an existing directory.
    """
    text = str(path_or_id)
    path = as_path(path_or_id)
    return (
        not may_be_repository(text)
        or path.is_dir()
        or (is_gguf(path) and path.is_file())
        or ("/" in text and path.parent.is_dir())
    )


def may_be_repository(text: str) -> bool:
    """Return True if a string has the form of a hub repository's name, and not that of a path."""
    return not text.startswith((".", "/", "~")) and _REPOSITORY.fullmatch(text) is not None


def is_gguf(path: str | Path) -> bool:
    """Return True if a path has the name of a GGUF file and is not a directory."""
    return Path(path).suffix.lower() == ".gguf" and not os.path.isdir(path)


def find_gguf(folder: Path, name: str | None = None) -> Path | None:
    """Return the GGUF file in a directory: the one called `name`, or the only one; None if there is none.

    Raises:
        CheckpointError: If there is none of that name, it has another suffix, or there are several without a name.
    """
    gguf_names = sorted(path.name for path in folder.glob("*") if is_gguf(path))
    listed = ", ".join(gguf_names) or "none"
    if name is not None:
        if (folder / name).is_file():
            if is_gguf(folder / name):
                return folder / name
            problem = Problem(ProblemKind.FILE, name, "expected a name that ends in .gguf")
            raise CheckpointError(f"cannot load {folder}", [problem], ["rename the GGUF file, or correct gguf_file"])
        problem = Problem(ProblemKind.FILE, name, f"no such file; GGUF files there: {listed}")
        raise CheckpointError(f"cannot load {folder}", [problem], ["correct gguf_file"])
    if len(gguf_names) > 1:
        problem = Problem(ProblemKind.FILE, str(folder), f"has several GGUF files: {listed}")
        advice = "pass the path of one of them, or gguf_file= with its name"
        raise CheckpointError(f"cannot load {folder}", [problem], [advice])
    return folder / gguf_names[0] if gguf_names else None


def similar_checkpoint(path: Path, *, or_config: bool = False) -> str:
    """Return ` (did you mean ...?)` with the directory or GGUF file next to a missing `path` that is most similar.

    Args:
        path: The path that does not exist.
        or_config: Whether to suggest also `.json` files.
    """
    try:
        near = [
            str(other)
            for other in path.parent.iterdir()
            if other.is_dir() or is_gguf(other) or (or_config and other.suffix == ".json")
        ]
    except OSError:
        return ""
    return did_you_mean(str(path), near)


def around(file: Path) -> str:
    """Return ` (did you mean ...?)` with a file's directory if that has a `config.json`, or an empty string."""
    return suggestion([str(file.parent)] if (file.parent / CONFIG_NAME).is_file() else [])


def similar_in_current_directory(name: str) -> str:
    """Return ` (did you mean ...?)` with the most similar directory or GGUF file in the current directory.

    Args:
        name: A string that may be a misspelled path or the name of a hub repository. With a `/`, nothing is similar.
    """
    return "" if "/" in name else similar_checkpoint(Path(name)).replace("(did you mean ", f"(did you mean .{os.sep}")


def resume_checkpoint_in(folder: Path) -> tuple[str, str] | None:
    """Return the problem and the advice if a directory is a resume checkpoint, or a version of one; None otherwise."""
    try:
        if VERSION.fullmatch(folder.name) and (folder / MANIFEST_NAME).is_file():
            problem, resume_folder = "is one version of a resume checkpoint, which save_checkpoint wrote", folder.parent
        elif any(VERSION.fullmatch(file.parent.name) for file in folder.glob(f"*/{MANIFEST_NAME}")):
            problem, resume_folder = "is a resume checkpoint, which save_checkpoint wrote", folder
        else:
            return None
    except OSError:
        return None
    return f"{problem}; expected a Hugging Face checkpoint", (
        "load the original checkpoint with from_pretrained(..., mesh=mesh), then call "
        f"load_checkpoint({str(resume_folder)!r}, model). To get a Hugging Face checkpoint, call "
        "model.save_pretrained afterwards"
    )


def checkpoints_below(folder: Path) -> str:
    """Return ` (did you mean ...?)` with up to three directories in `folder` that have a `config.json`."""
    try:
        below = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG_NAME}"))
    except OSError:
        return ""
    return suggestion(below[:3])


def cache_directory() -> Path:
    """Return the directory for downloads and results: `$NRL_MODELS_CACHE`, or `nrl_models` in the user's cache.

    Raises:
        CheckpointError: If no directory can have the path in `$NRL_MODELS_CACHE`, see `as_path`.
    """
    if directory := os.environ.get(CACHE_VARIABLE):
        try:
            return as_path(directory)
        except CheckpointError as error:
            raise CheckpointError(f"cannot use {CACHE_VARIABLE}", error.problems, ["correct the variable"]) from error
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nrl_models"


def leaves(file: str) -> bool:
    """Return True if a file's name points outside the checkpoint's directory."""
    path = PurePosixPath(file)
    return path.is_absolute() or ".." in path.parts or "\\" in file


def short_name(name: str) -> str:
    """Return a file's name to build longer names from, or a digest of it: file systems allow names of 255 bytes."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= 200 else hashlib.sha256(encoded).hexdigest()


def is_pickle(file: str) -> bool:
    """Return True if a file has a suffix of pickled weights."""
    return PurePosixPath(file).suffix in (".bin", ".pt", ".pth")
