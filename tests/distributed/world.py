"""Worlds of processes that run jobs. They are forked from a server that has imported torch, which takes seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from nrl_models.errors import Problem

JOB_SECONDS = 240
"""Timeout of a job in seconds."""

IMPORTED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "nrl_models.auto",
]
"""Modules that the server imports before it forks."""

RankError = tuple[str, str, tuple[Problem, ...], str]
"""An error's type name, its text, the problems that it lists, and its traceback."""


class RanksFailedError(AssertionError):
    """A job raised on some ranks.

    Attributes:
        errors: For each rank that raised, the error's type name and text.
        problems: For each of these ranks, the problems that the error lists.
    """

    def __init__(self, errors: dict[int, RankError]) -> None:
        self.errors = {rank: (kind, text) for rank, (kind, text, _, _) in errors.items()}
        self.problems = {rank: problems for rank, (_, _, problems, _) in errors.items()}
        super().__init__("\n".join(f"rank {rank}:\n{trace}" for rank, (*_, trace) in sorted(errors.items())))


class RanksLostError(AssertionError):
    """Some ranks exited or timed out during a job. The world has ended."""


class World:
    """Processes connected by gloo, with one thread each.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._jobs = [context.Queue() for _ in range(size)]
        self._results = context.Queue()
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            context.Process(target=_serve, args=(rank, size, store, self._jobs[rank], self._results), daemon=True)
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def run(self, job: Callable[..., Any], *arguments: Any, patience: float = JOB_SECONDS) -> list[Any]:
        """Run `job(*arguments)`, a module-level function, on every rank. Returns the results of all ranks.

        Args:
            job: The function.
            arguments: Its arguments.
            patience: Timeout in seconds.

        Raises:
            RanksFailedError: The job raised on some ranks.
            RanksLostError: Some ranks did not return.
        """
        for jobs in self._jobs:
            jobs.put((job, arguments))
        results: dict[int, Any] = {}
        errors: dict[int, RankError] = {}
        deadline = time.monotonic() + patience
        while len(results) + len(errors) < self.size:
            try:
                rank, failed, value = self._results.get(timeout=1)
            except queue.Empty:
                waiting = set(range(self.size)) - set(results) - set(errors)
                dead = {rank: status for rank in waiting if (status := self._processes[rank].exitcode) is not None}
                if not dead and time.monotonic() < deadline:
                    continue
                self.close()
                reason = f"ranks ended, with exit status: {dead}" if dead else f"ranks {sorted(waiting)} hang"
                others = {rank: f"{kind}: {text}" for rank, (kind, text, *_) in errors.items()}
                raise RanksLostError(f"{reason}; others: {others or 'nothing'}") from None
            (errors if failed else results)[rank] = value
        if errors:
            raise RanksFailedError(errors)
        return [results[rank] for rank in range(self.size)]

    def run_dying(self, dying: int, job: Callable[..., Any], *arguments: Any) -> dict[int, tuple[str, str]]:
        """Run `job(*arguments, dying)`, in which rank `dying` exits. Returns the errors of the others.

        Raises:
            AssertionError: Another rank hangs, or returns normally.
        """
        for jobs in self._jobs:
            jobs.put((job, (*arguments, dying)))
        errors: dict[int, tuple[str, str]] = {}
        while len(errors) < self.size - 1:
            try:
                rank, failed, value = self._results.get(timeout=JOB_SECONDS)
            except queue.Empty:
                raise AssertionError(f"others than rank {dying} hang") from None
            assert failed, f"rank {rank} returned although rank {dying} exited"
            errors[rank] = value[:2]
        return errors

    @property
    def alive(self) -> bool:
        """Whether every process is running."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, jobs: Any, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from transformers.utils import logging

    torch.set_num_threads(1)
    exclude_permanent_objects()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    while (message := _next(jobs)) is not None:
        job, arguments = message
        try:
            results.put((rank, False, job(*arguments)))
        except BaseException as error:
            problems = getattr(error, "problems", ())
            results.put((rank, True, (type(error).__name__, str(error), problems, traceback.format_exc())))
    results.close()
    results.join_thread()
    os._exit(0)  # destroying the gloo process group takes seconds


def exclude_permanent_objects() -> None:
    """Exclude objects that stay (torch, transformers, tests) from garbage collection, which saves 20% of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _next(jobs: Any) -> Any:
    """Return the next job. None also if the parent process was killed, which would leave this process behind.

    The server of forks is the parent to the operating system, and does not end before its forks.
    """
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        try:
            return jobs.get(timeout=5)
        except queue.Empty:
            continue
    return None
