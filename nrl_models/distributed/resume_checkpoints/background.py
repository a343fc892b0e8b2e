"""Asynchronous saves: a background thread writes a copy of the state while training continues."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from nrl_models.distributed.mesh import reporting_dead_ranks
from nrl_models.distributed.sharding import Sharding


class CheckpointSave:
    """A resume checkpoint that `save_checkpoint` writes, possibly in the background.

    Args:
        folder: Directory of the versions, for messages.
        write: Function that writes the new version and returns its directory.
    """

    def __init__(self, folder: Path, write: Callable[[], Path]) -> None:
        self._folder = folder
        self._write: Callable[[], Path] | None = write
        self._version: Path | None = None
        self._error: Exception | None = None
        self._is_reported = False
        self._finished = threading.Event()

    @classmethod
    def finished(cls, folder: Path, version: Path) -> CheckpointSave:
        """Return a save that has finished."""
        save = cls(folder, lambda: version)
        save.run()
        return save

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error is not None else f"saved {self._version}"
        return f"CheckpointSave({str(self._folder)!r}: {state})"

    def done(self) -> bool:
        """Return True if the save has finished or failed."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete, on disk and published on every rank.

        Args:
            timeout: Seconds to wait; None waits until the save ends.

        Returns:
            Directory of the new version.

        Raises:
            TimeoutError: If the save is still running after `timeout`.
            SaveError: If the disk is full or read-only. `save_checkpoint` lists the other errors of a save.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the checkpoint in {self._folder} is still being written after {timeout} seconds")
        if self._error is not None:
            self._is_reported = True
            raise self._error
        assert self._version is not None
        return self._version

    def run(self) -> None:
        """Write the checkpoint, and record the version or the error."""
        write, self._write = self._write, None  # frees the copy of the state at the end
        assert write is not None
        try:
            self._version = write()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # its frames would keep the copy of the state
            self._error = error
        finally:
            self._finished.set()

    def start(self) -> None:
        """Write the checkpoint in a background thread. The interpreter waits for it before it exits."""
        global _last
        _last = self
        threading.Thread(target=self.run, name="nrl_models-save", daemon=False).start()

    def report(self) -> None:
        """Print the error to stderr, unless `wait` has raised it."""
        if self._error is not None and not self._is_reported:
            self._is_reported = True
            text = f"{type(self._error).__name__}: {self._error}"
            print(f"nrl_models: the last checkpoint was not saved into {self._folder}\n{text}", file=sys.stderr)


_last: CheckpointSave | None = None
"""The last asynchronous save of this process. Each save waits for the one before."""


def finish_last(*, raising: bool) -> None:
    """Wait for the last asynchronous save of this process.

    Args:
        raising: Whether to raise the save's error, unless `wait` has raised it. Otherwise the next save raises it.

    Raises:
        SaveError: If the save failed. See also `CheckpointSave.wait`.
    """
    global _last
    if _last is None:
        return
    _last._finished.wait()
    if raising:
        finished, _last = _last, None
        if not finished._is_reported:
            finished.wait()


def group_for_saves(sharding: Sharding) -> dist.ProcessGroup | None:
    """Return a process group of a mesh's ranks for background threads; None for a single rank.

    It is separate from the groups that training uses, so the order of collectives between threads does not matter.
    Every rank has to call this. The group is created once per model.
    """
    if sharding.mesh.size() == 1:
        return None
    if sharding.save_group is None:
        ranks = sharding.mesh.mesh.flatten().tolist()
        with reporting_dead_ranks("prepare an asynchronous save"):
            sharding.save_group = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=True, group_desc="nrl_models: asynchronous saves"
            )
    return sharding.save_group


def _report_at_exit() -> None:
    if _last is not None:
        _last.report()


def _forget() -> None:
    global _last
    _last = None


atexit.register(_report_at_exit)  # the interpreter has joined the thread before
os.register_at_fork(after_in_child=_forget)  # a fork does not have the thread
