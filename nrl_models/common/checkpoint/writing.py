"""Writing files and checkpoints so that a reader, or a crash at any point, finds the old ones or the new ones whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nrl_models.common.checkpoint.durable import sync, sync_tree
from nrl_models.common.checkpoint.locks import TEMPORARY, locked, remove_dead, temporary
from nrl_models.common.checkpoint.publishing import publish
from nrl_models.common.garbage import no_collections
from nrl_models.errors import SaveError

_stages: set[Path] = set()
"""Directories that are being written into in this process."""


@contextmanager
def staged(target: str | Path) -> Iterator[Path]:
    """A directory to write a checkpoint into; on success its files replace those of `target`, see `publish`.

    If the body raises, or the process dies in it, `target` is untouched. If the body writes nothing
    (in a process that is not the writer), nothing is changed. What killed writers left is removed. Several may write at
    once, each into a directory of its own: the last to end is the one whose files stay. Within the body, the yielded
    directory may be staged again, and is then itself. Garbage collection is off meanwhile: safetensors makes several
    objects for each tensor.

    Raises:
        SaveError: the disk is full or read-only, `target` is a file, or another process does not end publishing.
    """
    target = Path(target)
    if target in _stages:
        yield target
        return
    if target.is_file():
        raise SaveError(f"cannot save into {target}: it is a file, expected a directory")
    with _reporting(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = f".{target.name}{TEMPORARY}"
        remove_dead(target.parent, beside)
        if target.is_dir():
            remove_dead(target, TEMPORARY)
        # Inside an existing target, so that moving never crosses file systems.
        place, prefix = (target, TEMPORARY) if target.is_dir() else (target.parent, beside)
        with temporary(place, prefix, directory=True) as stage:
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
    """Publish a stage, as `target` itself if there is no such directory yet."""
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
        if stage.parent != target and not stage.parent.samefile(target):  # another writer made it meanwhile
            inside = target / f"{TEMPORARY}{stage.name[-8:]}"
            os.rename(stage, inside)
            stage = inside
        publish(stage, target)


@contextmanager
def _reporting(target: Path) -> Iterator[None]:
    """Say of an error of the disk that `target` is as it was."""
    try:
        yield
    except SaveError:
        raise
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # of a network
            raise
        raise SaveError(
            f"cannot save into {target}: {error}. What was there is as it was; make room, or give another directory"
        ) from error


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file atomically: beside it first, then renamed, so that it is never incomplete.

    Any number of processes may write it at once; one of them is the last. Text is written as UTF-8; a pipe or device is
    written to as it is.

    Raises:
        SaveError: the disk is full or read-only; the file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    file = file.resolve()  # of a link what it names
    with _reporting(file):
        if file.exists() and not file.is_file():
            file.write_bytes(data)
            return
        prefix = f".{file.name}{TEMPORARY}"
        remove_dead(file.parent, prefix)
        with temporary(file.parent, prefix, directory=False) as beside:
            beside.write_bytes(data)
            sync(beside)
            beside.replace(file)
            sync(file.parent)
