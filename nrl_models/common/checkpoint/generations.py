"""Which files of a directory are its checkpoint while another process replaces them, and whether that happened.

A save is published by one rename to `PUBLISHED`, inside the directory; then its files move to their names, for readers
that know nothing of this (see `nrl_models.common.checkpoint.publishing`). From that rename on the checkpoint is what
lies there, also where the writer was killed before it was done. Readers change nothing. Imports nothing heavy.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME
from nrl_models.errors import CheckpointError, Problem, ProblemKind

PUBLISHED = ".nrl-published"
"""The directory with a checkpoint that is being moved into place."""

RECORD = ".nrl-replaces.json"
"""In it: `replaces`, the size and time of every file that the checkpoint replaces or removes, and `files`, its own."""

Identity = tuple[int, int, int, int]
"""Device, inode, size in bytes, and time of the last change in nanoseconds: another file has another."""


def identity(status: os.stat_result) -> Identity:
    """What distinguishes a file from one that replaced it, or from itself rewritten."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def identity_at(path: Path) -> Identity | None:
    """The identity of the file at a path; None if there is none."""
    try:
        return identity(os.stat(path))
    except OSError:
        return None


def version_at(path: Path) -> list[int] | None:
    """Size and time of the file at a path, which copies and other mounts keep; None if there is none."""
    found = identity_at(path)
    return None if found is None else list(found[2:])


def plain(folder: Path) -> Path:
    """The directory that a checkpoint was saved into: `folder`, or that in which it is `PUBLISHED`."""
    return folder.parent if folder.name == PUBLISHED else folder


def current(folder: Path) -> Path:
    """Where the files of the checkpoint in `folder` are now: there, or in its `PUBLISHED`.

    Raises:
        CheckpointError: a save was interrupted while its files moved to their names, and then another program wrote
            files there: neither is the checkpoint for sure.
    """
    published = folder / PUBLISHED
    while (before := identity_at(published / RECORD)) is not None:
        others = written_since(folder)
        if not others:
            return published
        if identity_at(published / RECORD) == before:
            detail = f"was written by another program after a save into {folder} was interrupted"
            problems = [Problem(ProblemKind.REPLACED, name, detail) for name in others]
            advice = f"save again; or delete {published} to take those files, or move its files up to take the save"
            raise CheckpointError(f"cannot load {folder}", problems, [advice])
    return folder


def read_record(published: Path) -> Mapping[str, Any] | None:
    """A published checkpoint's record; None if there is none, no longer, or one that no save of this library wrote."""
    try:
        record = read_object(published / RECORD)
        names = [PurePosixPath(name) for name in (*record["replaces"].keys(), *record["files"])]
    except (CheckpointError, LookupError, TypeError, AttributeError):
        return None
    return None if any(name.is_absolute() or ".." in name.parts for name in names) else record


def written_since(folder: Path) -> list[str]:
    """Files that are neither those of the checkpoint in `folder`'s `PUBLISHED` nor those that it replaces."""
    record = read_record(folder / PUBLISHED)
    if record is None:
        return [f"{PUBLISHED}/{RECORD}"]
    found = []
    for name in sorted({*record["replaces"], *record["files"]}):
        known = (None, record["replaces"].get(name), version_at(folder / PUBLISHED / name))
        if version_at(folder / name) not in known:
            found.append(name)
    return found


class Watch:
    """Remembers what was read of a checkpoint, to find out whether another process replaced it meanwhile.

    Made before anything is read; what is read after is added by `saw`.

    Args:
        folder: the directory.

    Attributes:
        location: where its files are, see `current`.

    Raises:
        CheckpointError: see `current`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = plain(folder)
        self.location = current(self.folder)
        # Open until the end: some file systems (FUSE) give a file that nobody has open another inode.
        self._open: list[int] = []
        self._at_exit = weakref.finalize(self, _close, self._open)
        self._seen = {name: self._identity(name) for name in (CONFIG_NAME, GENERATION_NAME)}

    def _identity(self, name: str) -> Identity | None:
        try:
            self._open.append(os.open(self.location / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError:
            return None
        return identity(os.fstat(self._open[-1]))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit()  # at once: a traceback may hold this for long

    def saw(self, files: Mapping[str, Identity | None]) -> None:
        """Add files that were read, and those that were not there (None), by name."""
        self._seen.update(files)

    def replaced(self) -> list[str]:
        """The files that are no longer those that were read."""
        while True:
            location = current(self.folder)
            found = [name for name, seen in self._seen.items() if identity_at(location / name) != seen]
            if not found or current(self.folder) == location:
                return found

    def require(self, name: str) -> None:
        """Raise if a file that was there at first is no longer where it was: a save moved it, and it was not read.

        Raises:
            CheckpointError: it is not there.
        """
        if self._seen.get(name) is not None and not (self.location / name).is_file():
            raise was_replaced(self.folder, [name])

    def changed(self) -> bool:
        """Whether files were replaced or moved: what failed meanwhile may have failed because of that."""
        return current(self.folder) != self.location or bool(self.replaced())

    def check(self) -> None:
        """Raise if a file was replaced.

        Raises:
            CheckpointError: it was, and what was read may be of two checkpoints.
        """
        if names := self.replaced():
            raise was_replaced(self.folder, names)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def was_replaced(folder: Path, names: Iterable[str]) -> CheckpointError:
    """The error for a checkpoint that changed while it was read."""
    detail = "was replaced or changed by another process while the checkpoint was read"
    problems = [Problem(ProblemKind.REPLACED, name, detail) for name in names]
    return CheckpointError(f"cannot load {folder}", problems, ["load it again, when nothing writes there"])
