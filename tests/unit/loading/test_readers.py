"""Reading threads that take jobs in batches."""

from __future__ import annotations

import threading

import pytest

from nrl_models.loading.weights import BATCHES, READERS, run_readers


@pytest.mark.parametrize("count", [0, 1, READERS * BATCHES + 1, 3 * READERS * BATCHES + 5])
def test_every_job_runs_once(count: int) -> None:
    done: list[int] = []
    lock = threading.Lock()

    def read(job: int) -> None:
        with lock:
            done.append(job)

    run_readers(read, range(count))
    assert sorted(done) == list(range(count))


def test_error_in_batch_is_raised() -> None:
    def read(job: int) -> None:
        if job == 777:
            raise OSError("the file ended")

    with pytest.raises(OSError, match="the file ended"):
        run_readers(read, range(2000))
