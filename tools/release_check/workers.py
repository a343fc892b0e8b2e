"""Run subjects in worker processes, so that a crash or a hang loses one subject and not the run.

`concurrent.futures` breaks its complete pool when a worker dies. This module replaces a dead worker, and reports its
subject as crashed. A subject that takes too long is reported as timed out. Earlier results of the subject are kept.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from multiprocessing.connection import Connection, wait
from typing import Any

POLL_SECONDS = 1.0


class Ending(StrEnum):
    """The way a subject ended."""

    FINISHED = auto()
    CRASHED = auto()
    TIMED_OUT = auto()


@dataclass(frozen=True)
class Result:
    """One value that a worker yielded for a subject."""

    subject: str
    value: Any


@dataclass(frozen=True)
class End:
    """The end of a subject.

    Attributes:
        subject: The subject.
        ending: The way it ended.
        detail: Exception or exit code of the process, or the timeout in seconds. Empty if it finished.
        seconds: Wall-clock time.
    """

    subject: str
    ending: Ending
    detail: str
    seconds: float


Run = Callable[[str], Iterable[Any]]
"""Yields the results of a subject. Importable by name, because workers are spawned."""


class _Worker:
    """A worker process with its current subject."""

    def __init__(self, run: Run) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=_serve, args=(run, remote), daemon=True)
        self.process.start()
        remote.close()
        self.subject: str | None = None
        self.is_new = True
        self.started = time.monotonic()

    def start(self, subject: str) -> None:
        self.subject, self.started = subject, time.monotonic()
        self.connection.send(subject)

    def end(self, ending: Ending, detail: str = "") -> End:
        assert self.subject is not None
        result = End(self.subject, ending, detail, time.monotonic() - self.started)
        self.subject = None
        return result

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def run_subjects(run: Run, subjects: Iterable[str], *, jobs: int, timeout: float) -> Iterator[Result | End]:
    """Run every subject, with `jobs` in parallel, and yield results immediately.

    Args:
        run: Yields a subject's results, in a worker.
        subjects: The subjects, started in this order.
        jobs: Number of worker processes.
        timeout: Timeout of one subject in seconds, including the start of its process.
    """
    waiting = deque(subjects)
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.subject for worker in workers):
            while waiting and len(workers) < jobs:
                workers.append(_Worker(run))
            for worker in workers:
                if worker.subject is None and waiting:
                    worker.start(waiting.popleft())
            busy = {worker.connection: worker for worker in workers if worker.subject is not None}
            for ready in wait(list(busy), POLL_SECONDS):
                worker = busy[ready]  # type: ignore[index]
                try:
                    value = worker.connection.recv()
                except EOFError:
                    worker.process.join()
                    yield worker.end(Ending.CRASHED, f"exit code {worker.process.exitcode}")
                    workers.remove(worker)
                    worker.close()
                    continue
                if isinstance(value, _Finished):
                    yield worker.end(Ending.CRASHED if value.error else Ending.FINISHED, value.error)
                else:
                    assert worker.subject is not None
                    yield Result(worker.subject, value)
            for worker in [worker for worker in workers if worker.subject is not None]:
                if time.monotonic() - worker.started > timeout:
                    yield worker.end(Ending.TIMED_OUT, f"more than {timeout:.0f} s")
                    workers.remove(worker)
                    worker.close()
    finally:
        for worker in workers:
            worker.close()


@dataclass(frozen=True)
class _Finished:
    """Sent after the last result of a subject. `error` describes an exception of `run`."""

    error: str = ""


def _serve(run: Run, connection: Connection) -> None:
    """Run the subjects that the parent process sends, until it closes the connection."""
    while True:
        try:
            subject = connection.recv()
        except EOFError:
            return
        finished = _Finished()
        try:
            for value in run(subject):
                connection.send(value)
        except Exception as error:  # any error of one subject, for example of an import; the next subject still runs
            traceback.print_exc()
            finished = _Finished(f"{type(error).__name__}: {error}")
        connection.send(finished)
