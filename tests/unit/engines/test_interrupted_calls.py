"""Engine calls interrupted by an exception: the next call works and receives its own response."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from bigram_worker import DELAY, SLOW_TOKEN, scores, table

from nrl_models.engines.hf import HFEngine
from nrl_models.engines.processes.worker_engine import WorkerEngine
from nrl_models.engines.transfer.sent_tensors import is_finite
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("interrupted")]  # the tests share the worker below


class Interruption(BaseException):
    """An exception like those raised by a timeout or Ctrl-C."""


@contextmanager
def interrupted(after: float = 0.3) -> Iterator[None]:
    """Raise an exception in this thread within a `with` block, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        with pytest.raises(Interruption):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class BigramEngine(WorkerEngine):
    """A bigram model in a subprocess."""

    name = "bigram"
    engine_name = "The worker"
    module = "bigram_worker"
    distribution = "torch"


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[BigramEngine]:
    with pytest.MonkeyPatch.context() as patch:
        folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        engine = BigramEngine.start(checkpoint)
    with engine:
        yield engine


def check(worker: BigramEngine, prompts: list[list[int]], weights: dict[str, torch.Tensor] | None = None) -> None:
    """Check the log-probabilities of each prompt, and the tokens."""
    weights = weights or table(0)
    for prompt, logprobs in zip(prompts, worker.score(prompts, Sampling()), strict=True):
        assert logprobs[1:] == pytest.approx(scores(weights, prompt), abs=1e-5)
    (sample,) = worker.generate(prompts[:1], Sampling(0.0), max_new_tokens=3)
    assert list(sample.logprobs) == pytest.approx(scores(weights, [prompts[0][-1], *sample.tokens]), abs=1e-5)


def test_interrupted_call_response_is_discarded(worker: BigramEngine, prompts: list[list[int]]) -> None:
    slow = [[SLOW_TOKEN, *prompt[1:]] for prompt in prompts]
    with interrupted():
        worker.score(slow[:1], Sampling())
    check(worker, prompts)
    with interrupted():
        worker.generate([[SLOW_TOKEN]], Sampling(), max_new_tokens=1)
    with interrupted(0.1):  # while the worker runs the first call
        worker.score(prompts[:1], Sampling())
    check(worker, prompts)


def test_interrupted_call_with_long_response_and_request(worker: BigramEngine) -> None:
    """Both exceed the pipe buffer, so the worker reads the request only after its response is read."""
    rows = [[SLOW_TOKEN, *range(20, 220)]] + [list(range(20, 220)) for _ in range(80)]
    with interrupted():
        worker.score(rows, Sampling())
    last_scores = worker.score(rows[1:], Sampling(), last=1)
    assert [row[-1] for row in last_scores] == pytest.approx(scores(table(0), rows[1])[-1:] * 80, abs=1e-5)


def test_worker_survives_sigint(worker: BigramEngine, prompts: list[list[int]]) -> None:
    worker.worker.process.send_signal(signal.SIGINT)
    check(worker, prompts)


def test_interrupted_refit_raises_mixed_weights_error(worker: BigramEngine, prompts: list[list[int]]) -> None:
    slow = table(1)
    slow["head"][0, 0] = SLOW_TOKEN
    with interrupted(DELAY * 0.7):
        worker.refit(slow.items())
    with pytest.raises(MixedWeightsError, match="raises on every call until"):
        worker.score(prompts, Sampling())
    worker.refit(table(2).items())
    check(worker, prompts, table(2))
    with pytest.raises(MixedWeightsError, match="left 1 tensors unwritten: gate"):
        worker.refit([("head", table(3)["head"])])
    worker.refit(table(0).items())
    check(worker, prompts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_not_sent(worker: BigramEngine, prompts: list[list[int]], value: float) -> None:
    broken = table(1)
    broken["gate"][3, 4] = value
    with pytest.raises(EngineError, match=r"gate has . NaN and . infinite values of 262,144") as raised:
        worker.refit(broken.items())
    assert not isinstance(raised.value, MixedWeightsError)
    check(worker, prompts)
    with pytest.raises(EngineError, match="gate was sent twice in one refit"):
        worker.refit([*table(1).items(), ("gate", table(1)["gate"])])
    check(worker, prompts)


def test_calls_from_two_threads_are_serialized(
    worker: BigramEngine, engine: HFEngine, trainer: HFEngine, prompts: list[list[int]]
) -> None:
    """A refit waits for a generation in another thread, and the other way around."""
    weights = dict(trainer.model.state_dict_adapter.iter_export(trainer.model))
    started, order, errors = threading.Event(), [], []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        started.set()
        time.sleep(0.3)
        yield from weights.items()
        order.append("refit")

    def generate() -> None:
        started.wait()
        try:
            engine.generate(prompts, Sampling(), max_new_tokens=2)
        except EngineError as error:
            errors.append(error)
        order.append("generate")

    thread = threading.Thread(target=generate)
    thread.start()
    engine.refit(tensors())
    thread.join()
    assert (order, errors) == (["refit", "generate"], [])
    results: list[tuple[list[list[int]], list[list[float]]]] = []

    def score(rows: list[list[int]]) -> None:
        results.append((rows, worker.score(rows, Sampling())))

    threads = [threading.Thread(target=score, args=([[token, *prompt] for prompt in prompts],)) for token in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, row_scores in results:
        for row, logprobs in zip(rows, row_scores, strict=True):
            assert logprobs[1:] == pytest.approx(scores(table(0), row), abs=1e-5)
    assert len(results) == 4


@pytest.mark.parametrize(("values", "finite"), [
    ([float("-inf")], True), ([float("nan")], False), ([float("inf"), 1.0], False), ([], True),
])  # fmt: skip
def test_is_finite_accepts_single_infinity(values: list[float], finite: bool) -> None:
    """Gemma 4's linears clip their inputs between buffers, which are infinite without clipping."""
    assert is_finite(torch.tensor(values)) is finite
