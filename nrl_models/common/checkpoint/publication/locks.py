"""Locks on files and directories that are released when their process ends, also used to find stale temporary files.

The locks are `flock`s on the protected files, so there are no lock files that a killed process could leave behind. Some
network file systems have no locks. There, nothing is locked, and no temporary file is considered stale.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nrl_models.errors import SaveError

WAIT_SECONDS = 60.0
"""Maximum time to wait for another writer that moves its files into place, which usually takes less than a second."""

TEMPORARY = ".nrl-saving-"
"""Part of the names of this library's temporary files; eight random digits follow."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}


def _take(descriptor: int) -> bool | None:
    """Try to take the lock. Returns False if another process has it, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _release(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also releases it in processes that were forked in between
    os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Prevent other writers (processes and threads) from publishing into a directory. Waits for a running one.

    Raises:
        SaveError: If another writer does not finish within `WAIT_SECONDS`.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + WAIT_SECONDS
        while _take(descriptor) is False:
            if time.monotonic() > until:
                raise SaveError(
                    f"cannot save into {folder}: another process has been saving into it for {WAIT_SECONDS:.0f} "
                    "seconds. End it, or save elsewhere"
                )
            time.sleep(0.01)
        yield
    finally:
        _release(descriptor)


@contextmanager
def temporary(where: Path, prefix: str, *, directory: bool) -> Iterator[Path]:
    """Create a file or directory in `where`, named `prefix` plus random digits. Removed at exit if it still exists.

    Its lock shows other processes that it is in use, see `remove_dead`.
    """
    while True:
        path = where / f"{prefix}{secrets.token_hex(4)}"
        if directory:
            path.mkdir()
        else:
            path.touch(exist_ok=False)
        with suppress(FileNotFoundError):  # before it was locked, another writer took it for a dead process's
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if _take(descriptor) is not False and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
            os.close(descriptor)
    try:
        yield path
    finally:
        _release(descriptor)
        _remove(path)


def remove_dead(where: Path, prefix: str) -> None:
    """Remove leftovers of killed processes from `temporary` with the same arguments."""
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{8}")
    for name in os.listdir(where):
        if pattern.fullmatch(name) is None:
            continue
        path = where / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone, or another user's
            continue
        try:
            if _take(descriptor):
                _remove(path)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
