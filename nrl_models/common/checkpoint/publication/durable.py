"""Sync files to disk, so that they survive a power failure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from nrl_models.errors import UnknownArgumentError

VARIABLE = "NRL_MODELS_FSYNC"
"""Environment variable that disables syncing: with `0`, the kernel decides when files reach the disk."""


def is_durable() -> bool:
    """Return True if saved files are synced to disk before they are published.

    Raises:
        UnknownArgumentError: If the variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise UnknownArgumentError(f"{VARIABLE}={value!r}: expected 0 or 1")
    return value == "1"


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are written to disk.

    Raises:
        OSError: If they cannot be written, because the disk is full or broken.
    """
    if not is_durable():
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # file systems that cannot do this with directories
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files and subdirectories of a directory, and the directory, to disk."""
    if not is_durable():
        return
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not (path := Path(directory, name)).is_symlink():
                sync(path)
        sync(Path(directory))
