"""Write files and checkpoints atomically: after a crash, a reader finds either the old or the new ones, complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError

from nrl_models.common.checkpoint.generations import plain
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, short_name
from nrl_models.common.checkpoint.publication.durable import sync, sync_tree
from nrl_models.common.checkpoint.publication.locks import TEMPORARY, locked, remove_dead, temporary
from nrl_models.common.checkpoint.publication.publishing import publish
from nrl_models.common.process_state import no_collections
from nrl_models.errors import (
    CheckpointError,
    Problem,
    ProblemKind,
    SaveError,
    UnknownArgumentError,
    did_you_mean,
    shown,
)

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data")
"""Patterns of weight files, in any framework's format."""


def folder_to_write(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a directory to save into, with `~` expanded.

    Raises:
        UnknownArgumentError: If it is neither a string nor a path, is empty, or no directory can have that path: an
            unknown user's home directory, a null byte, a loop of symbolic links, too many characters.
    """
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise UnknownArgumentError(f"{shown(folder)}: expected a directory to save into, as a string or a path")
    if not os.fspath(folder):
        raise UnknownArgumentError("the directory to save into is empty: pass '.' for the current directory")
    return _expanded(folder, f"{shown(str(folder))} is not a directory to save into")


def path_to_write(option: str, path: str | os.PathLike[str]) -> Path:
    """Return a path from an option, of a file or a directory to write, with `~` expanded.

    Args:
        option: Name of the option, for the message.
        path: Its value.

    Raises:
        UnknownArgumentError: If it is neither a string nor a path, or no file can have that path.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise UnknownArgumentError(f"{option}={shown(path)}: expected a path, as a string or a pathlib.Path")
    return _expanded(path, f"{option}={shown(str(path))} is not a path to write to")


def _expanded(path: str | os.PathLike[str], summary: str) -> Path:
    try:
        expanded = Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(expanded)
    except (OSError, RuntimeError, ValueError) as error:
        raise UnknownArgumentError(f"{summary}: {getattr(error, 'strerror', None) or error}") from error
    return expanded


def checked_file_size(size: int | str) -> int | str:
    """Return a maximum file size.

    Raises:
        UnknownArgumentError: If it is neither a number of bytes nor a string such as "5GB".
    """
    check_size("max_shard_size", size, lambda size: split_torch_state_dict_into_shards({}, max_shard_size=size))
    return size


_FORMER_KEYWORDS = ("safe_serialization", "save_function")
"""Keywords of older transformers, without effect."""


def require_save_keywords(options: Iterable[str], known: Iterable[str]) -> None:
    """Check further keywords of `save_pretrained` for misspellings. Others are passed on: transformers ignores them.

    Args:
        options: Names of the keywords.
        known: Parameters of transformers' `save_pretrained`.

    Raises:
        UnknownArgumentError: If a name is not known, but similar to a known one.
    """
    known = set(known) - {"kwargs"}
    unknown = [name for name in options if name not in known and name not in _FORMER_KEYWORDS]
    if similar := [name + hint for name in unknown if (hint := did_you_mean(name, known, cutoff=0.8))]:
        raise UnknownArgumentError(f"unknown keyword of save_pretrained: {', '.join(similar)}")


def check_size(option: str, size: int | str, parse: Callable[[int | str], object]) -> None:
    """Check an option that is a size in bytes.

    Args:
        option: Its name, for the message.
        size: Its value.
        parse: Function of the package that reads it, which raises `ValueError` for other strings.

    Raises:
        UnknownArgumentError: If it is neither a number of bytes nor a string such as "5GB".
    """
    try:
        if not isinstance(size, int | str) or isinstance(size, bool):
            raise ValueError("It is neither a number of bytes nor a string.")
        if str(size).lstrip().startswith("-"):
            raise ValueError("It is negative.")
        parse(size)
    except ValueError as error:
        raise UnknownArgumentError(
            f"{option}={shown(size)}: expected bytes, or a size such as '5GB'. {error}"
        ) from error


def require_replaceable(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise if writing a checkpoint to `target` would lose one.

    Args:
        source: Directory or GGUF file that is read.
        target: Directory to write.
        overwrite: Whether a checkpoint in `target` may be replaced.

    Raises:
        CheckpointError: If `target` is the source, or has a checkpoint and `overwrite` is False.
    """
    with reporting_disk(target):
        exists = target.exists()
    if exists and plain(source).resolve() == target.resolve():
        problem = Problem(ProblemKind.FILE, str(target), "is the checkpoint itself, which cannot be written in place")
        raise CheckpointError(f"cannot write {target}", [problem], ["pass another directory"])
    patterns = (CONFIG_NAME, *WEIGHT_FILES, "*.index.json")
    existing = sorted({path.name for pattern in patterns for path in target.glob(pattern)})
    if existing and not overwrite:
        more = f" and {len(existing) - 2} more files" if len(existing) > 3 else ""
        detail = f"holds a checkpoint: {', '.join(existing[: 2 if more else 3])}{more}"
        advice = ["pass --overwrite (overwrite=True) to replace it, or another directory"]
        raise CheckpointError(f"cannot write {target}", [Problem(ProblemKind.FILE, str(target), detail)], advice)


_stages: set[Path] = set()
"""Directories that are being written into in this process."""


@contextmanager
def staged(target: str | Path) -> Iterator[Path]:
    """Yield a directory to write a checkpoint into. On success, its files replace those of `target`, see `publish`.

    - If the body raises or the process dies in it, `target` does not change.
    - If the body writes nothing (in processes that do not write), nothing changes.
    - Directories left by killed writers are removed.
    - Several writers may run at once in separate directories. The files of the last one to finish stay.
    - If the yielded directory is staged again within the body, the same directory is yielded.
    - Garbage collection is disabled in the body, because safetensors creates several objects per tensor.

    Raises:
        SaveError: If the disk is full or read-only, `target` is a file, or another process does not finish publishing.
    """
    target = Path(target)
    if target in _stages:
        yield target
        return
    with reporting_disk(target):
        if target.is_file():
            raise SaveError(f"cannot save into {target}: it is a file, expected a directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = f".{short_name(target.name)}{TEMPORARY}"
        remove_dead(target.parent, beside)
        if target.is_dir():
            remove_dead(target, TEMPORARY)
        # Inside an existing target, so that moving never crosses file systems.
        parent, prefix = (target, TEMPORARY) if target.is_dir() else (target.parent, beside)
        with temporary(parent, prefix, directory=True) as stage:
            _stages.add(stage)
            try:
                with no_collections():
                    yield stage
            finally:
                _stages.remove(stage)
            if any(stage.iterdir()):
                sync_tree(stage)
                _put(stage, target)


def _put(stage: Path, target: Path) -> None:
    """Publish a stage. If `target` does not exist yet, the stage becomes `target`."""
    if not target.is_dir():
        try:
            os.rename(stage, target)
        except OSError:
            if not target.is_dir():
                raise
        else:
            sync(target.parent)
            return
    with locked(target):
        if stage.parent != target and not stage.parent.samefile(target):  # another writer has created it since
            inside = target / f"{TEMPORARY}{stage.name[-8:]}"
            os.rename(stage, inside)
            stage = inside
        publish(stage, target)


@contextmanager
def reporting_disk(target: Path) -> Iterator[None]:
    """Turn disk errors into `SaveError`, whose message states that `target` did not change."""
    try:
        yield
    except SaveError:
        raise
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # network error
            raise
        is_full = isinstance(error, SafetensorError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise SaveError(
            f"cannot save into {target}: {reason}. Existing files did not change; "
            f"{'free some space, or ' if is_full else ''}use another directory"
        ) from error


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file atomically: to a temporary file in the same directory, which is then renamed.

    Any number of processes may write it at once; the last one wins. Text is written as UTF-8. Pipes and devices are
    written directly.

    Raises:
        SaveError: If the disk is full or read-only. The file did not change.
    """
    data = content.encode() if isinstance(content, str) else content
    file = file.resolve()  # write to the target of a link
    with reporting_disk(file):
        if file.exists() and not file.is_file():
            file.write_bytes(data)
            return
        prefix = f".{short_name(file.name)}{TEMPORARY}"
        remove_dead(file.parent, prefix)
        with temporary(file.parent, prefix, directory=False) as beside:
            beside.write_bytes(data)
            sync(beside)
            beside.replace(file)
            sync(file.parent)
