"""A vLLM process killed during a request raises an error instead of waiting forever."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import psutil
import pytest
import torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling
from tests.engine.one_engine import OneEngine

TOKENS = [list(range(50, 90))]
OPTIONS = {"dtype": torch.float32, "max_length": 256, "load_format": "dummy", "multiprocessing": True}


@pytest.fixture
def engine_and_kill(demo: Path, vllm: OneEngine) -> Iterator[tuple[VLLMEngine, Callable[[], None]]]:
    """Return an engine in a subprocess, and a function that stops it immediately and kills it two seconds later."""
    vllm.stop()
    current_process = psutil.Process()
    others = set(current_process.children(recursive=True))
    with VLLMEngine.start(demo, **OPTIONS) as engine:
        started = [child for child in current_process.children(recursive=True) if child not in others]
        processes = [child for child in started if "resource_tracker" not in " ".join(child.cmdline())]
        assert processes

        def kill() -> None:
            for process in processes:
                process.send_signal(signal.SIGSTOP)  # it accepts the next call and does not respond
            Timer(2.0, lambda: [process.kill() for process in processes]).start()

        yield engine, kill


@pytest.mark.timeout(300)
def test_engine_killed_during_refit_raises(
    demo: Path, demo_trainer: HFEngine, engine_and_kill: tuple[VLLMEngine, Callable[[], None]]
) -> None:
    engine, kill = engine_and_kill
    model = demo_trainer.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = demo_trainer.score(TOKENS, Sampling())

    def tensors() -> Iterator[NamedTensor]:
        for number, pair in enumerate(model.state_dict_adapter.iter_export(model)):
            if number == 5:
                kill()
            yield pair

    with pytest.raises(EngineError, match=r"vLLM failed: .*its process has died.*restart it if it has died"):
        engine.refit(tensors(), bucket_bytes=2**18)
    with pytest.raises(EngineError, match="vLLM failed"):
        engine.score(TOKENS, Sampling())
    engine.close()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    with VLLMEngine.start(demo, **OPTIONS) as other:
        assert other.refit(model.state_dict_adapter.iter_export(model)).unwritten == ()
        (scores,) = other.score(TOKENS, Sampling())
    assert scores[1:] == pytest.approx(expected[0][1:], abs=1e-4)


@pytest.mark.timeout(300)
def test_engine_killed_during_generation_raises(engine_and_kill: tuple[VLLMEngine, Callable[[], None]]) -> None:
    engine, kill = engine_and_kill
    kill()
    with pytest.raises(EngineError, match="vLLM failed"):
        engine.generate(TOKENS, Sampling(), max_new_tokens=100, seed=0)
