"""Calls of `VLLMEngine`: locks, closed engines and interrupts, with a stand-in for vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nrl_models.engines.vllm import vllm_calls, vllm_engine
from nrl_models.engines.vllm.vllm_engine import VLLMEngine
from nrl_models.engines.vllm.vllm_worker import ConsistencyWorker
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling

LOGITS = torch.tensor([[0.0, 1.0, 3.0]])


class Interruption(BaseException):
    """An exception like those raised by a timeout or Ctrl-C."""


class Model(torch.nn.Module):
    def compute_logits(self) -> torch.Tensor:
        return LOGITS


class StandIn:
    """A `vllm.LLM` with one worker.

    Attributes:
        interrupt: Called before and after each call of a worker, with the name of the method.
        computed: The logits of the last step.
    """

    def __init__(self) -> None:
        model_config = SimpleNamespace(
            enforce_eager=True,
            get_vocab_size=lambda: 3,
            hf_config=None,
            logprobs_mode="processed_logprobs",
            dtype=torch.float32,
            max_model_len=64,
            using_transformers_backend=lambda: False,
        )
        config = SimpleNamespace(
            model_config=model_config,
            lora_config=None,
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        )
        self.llm_engine = SimpleNamespace(
            vllm_config=config, engine_core=SimpleNamespace(shutdown=lambda: None), remove_lora=lambda _: None
        )
        self.worker = ConsistencyWorker()
        model = Model()
        self.worker.model_runner = SimpleNamespace(get_model=lambda: model)
        self.computed: torch.Tensor | None = None
        self.interrupt: Callable[[str], None] = lambda _: None

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.interrupt(method)
        result = getattr(self.worker, method)(*args)
        self.interrupt(method)
        return [result]

    def generate(self, *_: Any, **__: Any) -> list[Any]:
        self.computed = self.worker.nrl_model().compute_logits()
        return []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VLLMEngine:
    monkeypatch.setattr(vllm_calls, "import_vllm", lambda: SimpleNamespace(SamplingParams=dict))
    monkeypatch.setattr(vllm_engine, "free_vllm", lambda _: None)
    monkeypatch.setattr(vllm_engine, "takes_raw_images", lambda _: True)
    monkeypatch.setattr(vllm_calls, "with_images", lambda prompts, _: prompts)
    for name in ("samples_from", "scores_from"):
        monkeypatch.setattr(vllm_engine, name, lambda *_, **__: [])
    return VLLMEngine(StandIn())


CALLS: dict[str, Callable[[VLLMEngine], Any]] = {
    "image_calls": lambda engine: engine.image_calls([1], []),
    "note_weights": VLLMEngine.note_weights,
    "unchanged_weights": VLLMEngine.unchanged_weights,
    "use_adapter": lambda engine: engine.use_adapter(Path("adapter")),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_after_close_raises_engine_error(engine: VLLMEngine, name: str) -> None:
    engine.close()
    with pytest.raises(EngineError, match="vllm is closed: start another engine"):
        CALLS[name](engine)


@pytest.mark.parametrize("name", CALLS)
def test_call_waits_for_refit_in_another_thread(engine: VLLMEngine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, may_end, order = threading.Event(), threading.Event(), []
    monkeypatch.setattr(engine.llm, "reset_mm_cache", lambda: order.append("call"), raising=False)
    monkeypatch.setattr(engine.llm, "collective_rpc", lambda *_, **__: order.append("call") or [[]])

    def refit(*_: Any) -> dict[str, Any]:
        started.set()
        may_end.wait(10)
        order.append("refit")
        return {"digests": {}, "unwritten": [], "stale_buffers": []}

    def call() -> None:
        try:
            CALLS[name](engine)
        except Exception:  # the stand-in has no images and adapters
            order.append("error")
        order.append("call")

    monkeypatch.setattr(engine, "_refit", refit)
    threads = [threading.Thread(target=lambda: engine.refit([])), threading.Thread(target=call)]
    threads[0].start()
    started.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert order[0] == "refit"
    assert order[-1] == "call"


def test_image_calls_after_failed_refit_raise(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"digests": {}, "unwritten": ["bias"], "stale_buffers": []}
    monkeypatch.setattr(engine, "_refit", lambda *_: found)
    with pytest.raises(MixedWeightsError):
        engine.refit([])
    with pytest.raises(MixedWeightsError, match="left 1 tensors unwritten: bias"):
        engine.image_calls([1], [])


def test_weights_of_all_workers_are_reported(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under tensor and pipeline parallelism, a weight may be unwritten or unchanged in one worker only."""
    refit_answers = [
        {"digests": {"a": "1"}, "unwritten": (), "stale_buffers": ("b",)},
        {"digests": {"a": "1"}, "unwritten": ("q", "k"), "stale_buffers": ()},
        {"digests": {"a": "1"}, "unwritten": ("k",), "stale_buffers": ("b",)},
    ]
    answers: dict[str, list[Any]] = {
        "nrl_note_weights": [True, False],
        "nrl_unchanged_weights": [["a"], ["a", "b (1 of 2 rows)"]],
        "nrl_refit_finish": refit_answers,
        "nrl_refit_abandon": [False, True],
    }
    monkeypatch.setattr(engine.llm, "collective_rpc", lambda method, args=(): answers.get(method, [None, None]))
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: None, raising=False)
    assert engine.note_weights() is False
    assert engine.unchanged_weights() == ["a", "b (1 of 2 rows)"]
    report = engine.refit([("a", LOGITS)], partial=True)
    assert (report.digests, report.unwritten, report.stale_buffers) == ({"a": "1"}, ("q", "k"), ("b",))

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("disk")
        yield

    with pytest.raises(OSError, match="disk"):
        engine.refit(failing())
    with pytest.raises(MixedWeightsError):  # the second worker has new weights
        engine.score([[0, 1]], Sampling())


@pytest.mark.parametrize("number", range(5))
def test_generate_after_interrupted_score_uses_unprocessed_logits(engine: VLLMEngine, number: int) -> None:
    """Interrupts come before or after the workers change how they process logits, or not at all."""
    llm, calls = engine.llm, []

    def interrupt(method: str) -> None:
        calls.append(method)
        if len(calls) == number + 1:
            raise Interruption

    llm.interrupt = interrupt
    with nullcontext() if number == 4 else pytest.raises(Interruption):
        engine.score([[0, 1]], Sampling(temperature=0.5))
    if number in (2, 3, 4):
        assert torch.equal(llm.computed, LOGITS / 0.5)
    llm.interrupt = lambda _: None
    engine._generate([[0]], Sampling(), max_new_tokens=1, seed=0, ignore_end=True)
    assert torch.equal(llm.computed, LOGITS)
    engine.score([[0, 1]], Sampling())
    assert torch.equal(llm.computed, LOGITS)
    engine.score([[0, 1]], Sampling(temperature=0.5))
    assert torch.equal(llm.computed, LOGITS / 0.5)
