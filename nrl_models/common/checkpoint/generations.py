"""Find the current files of a checkpoint while another process replaces them, and detect replacements.

A save is published by one rename to `PUBLISHED` inside the directory. Then its files are moved to their names, for
readers without this library (see `publication.publishing`). From the rename on, the files in `PUBLISHED` are the
checkpoint, even if the writer is killed before it finishes. Readers change nothing. This module has no heavy imports.
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
"""Directory of a checkpoint that is being moved into place."""

RECORD = ".nrl-replaces.json"
"""File in `PUBLISHED`. `replaces` has size and time of all replaced or removed files; `files` has the new ones."""

Identity = tuple[int, int, int, int]
"""Device, inode, size in bytes, and modification time in nanoseconds. Changes if a file is replaced or rewritten."""


def identity(status: os.stat_result) -> Identity:
    """Return values that change when a file is replaced or rewritten."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def identity_at(path: Path) -> Identity | None:
    """Return the identity of the file at a path; None if there is none."""
    try:
        return identity(os.stat(path))
    except OSError:
        return None


def version_at(path: Path) -> list[int] | None:
    """Return size and time of the file at a path, which copies and other mounts preserve; None if there is none."""
    file_identity = identity_at(path)
    return None if file_identity is None else list(file_identity[2:])


def plain(folder: Path) -> Path:
    """Return the directory into which a checkpoint was saved: `folder`, or its parent if `folder` is `PUBLISHED`."""
    return folder.parent if folder.name == PUBLISHED else folder


READ = (".codes", ".gguf", ".jinja", ".json", ".model", ".py", ".safetensors", ".spm", ".tiktoken", ".txt", ".vocab")
"""Suffixes of files that this library or transformers reads from a checkpoint."""

TEMPLATES = "additional_chat_templates"
"""The directory from which transformers reads additional chat templates."""


def contents_of(folder: Path) -> list[Path]:
    """Return the directories in which files of the checkpoint in `folder` may be.

    These are the directory itself, and for a snapshot in the hub's cache `blobs` of the same repository.
    """
    root = plain(Path(os.path.realpath(folder)))
    snapshots = (path.parent for path in (root, *root.parents) if path.parent.name == "snapshots")
    return [root, *(path.parent / "blobs" for path in list(snapshots)[:1])]


def link_outside(folder: Path, name: str) -> str:
    """Return the problem if a file is a link to a file outside of the checkpoint; otherwise an empty string.

    Also if no file can have that name: it has a null byte or half of a surrogate pair.
    """
    try:
        real = Path(os.path.realpath(folder / name))
    except ValueError:
        return "is not the name of a file"
    is_inside = any(real.is_relative_to(directory) for directory in contents_of(folder))
    return "" if is_inside else f"is a link that leads out of the checkpoint, to {real}"


def require_links_inside(folder: Path) -> None:
    """Check that no file in a directory is a link to a file outside, before transformers reads it.

    Links inside the directory are allowed, and links to `blobs` of the same repository in the hub's cache.

    Raises:
        CheckpointError: If there are such links.
    """
    try:
        paths = [*folder.iterdir(), *(folder / TEMPLATES).glob("*")]
    except OSError:  # the directory does not exist, or another process has moved it
        return
    names = sorted(str(path.relative_to(folder)) for path in paths if path.suffix in READ)
    problems = [
        Problem(ProblemKind.FILE, name, detail) for name in names if (detail := link_outside(folder, name)) != ""
    ]
    if problems:
        raise CheckpointError(f"cannot load {folder}", problems, [LINK_ADVICE])


LINK_ADVICE = "replace the links by the files that they lead to, if you trust them"


def current(folder: Path) -> Path:
    """Return the current location of the checkpoint's files: `folder`, or its `PUBLISHED`.

    Raises:
        CheckpointError: If a save was interrupted while files were moved to their names, and another program wrote
            files since. Then neither location is reliable.
    """
    published = folder / PUBLISHED
    while (before := identity_at(published / RECORD)) is not None:
        others = written_since(folder)
        if not others:
            return published
        if identity_at(published / RECORD) == before:
            detail = f"was written by another program after a save into {folder} was interrupted"
            problems = [Problem(ProblemKind.REPLACED, name, detail) for name in others]
            advice = f"save again; or delete {published} to keep those files, or move its files up to keep the save"
            raise CheckpointError(f"cannot load {folder}", problems, [advice])
    return folder


def read_record(published: Path) -> Mapping[str, Any] | None:
    """Return the record of a published checkpoint; None if there is none, or it was not written by this library."""
    try:
        record = read_object(published / RECORD)
        names = [PurePosixPath(name) for name in (*record["replaces"].keys(), *record["files"])]
    except (CheckpointError, LookupError, TypeError, AttributeError):
        return None
    return None if any(name.is_absolute() or ".." in name.parts for name in names) else record


def written_since(folder: Path) -> list[str]:
    """Return files that belong neither to the checkpoint in `PUBLISHED` nor to the one that it replaces."""
    record = read_record(folder / PUBLISHED)
    if record is None:
        return [f"{PUBLISHED}/{RECORD}"]
    foreign_files = []
    for name in sorted({*record["replaces"], *record["files"]}):
        known = (None, record["replaces"].get(name), version_at(folder / PUBLISHED / name))
        if version_at(folder / name) not in known:
            foreign_files.append(name)
    return foreign_files


class FileWatch:
    """Record which files of a checkpoint were read, to detect whether another process replaced them.

    Create it before anything is read. Files that are read later are added by `saw`.

    Args:
        folder: Directory of the checkpoint.

    Attributes:
        location: Directory of the files, see `current`.

    Raises:
        CheckpointError: See `current`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = plain(folder)
        self.location = current(self.folder)
        # Keep files open, because some file systems (FUSE) change the inode of closed files.
        self._open: list[int] = []
        self._at_exit = weakref.finalize(self, _close, self._open)
        self._seen = {name: self._identity(name) for name in (CONFIG_NAME, GENERATION_NAME)}

    def _identity(self, name: str) -> Identity | None:
        try:
            self._open.append(os.open(self.location / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError:  # there is none, or it may not be read, which its reader reports
            return identity_at(self.location / name)
        return identity(os.fstat(self._open[-1]))

    def __enter__(self) -> FileWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit()  # immediately, because a traceback may keep this object alive

    def saw(self, files: Mapping[str, Identity | None]) -> None:
        """Add files that were read, and files that did not exist (None), by name."""
        self._seen.update(files)

    def replaced(self) -> list[str]:
        """Return the files that differ from those that were read."""
        while True:
            location = current(self.folder)
            changed_files = [name for name, seen in self._seen.items() if identity_at(location / name) != seen]
            if not changed_files or current(self.folder) == location:
                return changed_files

    def require(self, name: str) -> None:
        """Raise if a file that existed at first was moved by a save before it was read.

        Raises:
            CheckpointError: If it no longer exists.
        """
        if self._seen.get(name) is not None and not (self.location / name).exists():
            raise was_replaced(self.folder, [name])

    def changed(self) -> bool:
        """Return True if files were replaced or moved since. This may be the cause of an error in the meantime."""
        return current(self.folder) != self.location or bool(self.replaced())

    def check(self) -> None:
        """Raise if a file was replaced.

        Raises:
            CheckpointError: If a file was replaced, so the values read may be of two checkpoints.
        """
        if names := self.replaced():
            raise was_replaced(self.folder, names)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def was_replaced(folder: Path, names: Iterable[str]) -> CheckpointError:
    """Return the error for a checkpoint that changed while it was read."""
    detail = "was replaced or changed by another process while the checkpoint was read"
    problems = [Problem(ProblemKind.REPLACED, name, detail) for name in names]
    return CheckpointError(f"cannot load {folder}", problems, ["load it again, when nothing writes there"])
