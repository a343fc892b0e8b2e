"""A vLLM in a subprocess recovers from an incomplete refit. If it is killed, calls raise instead of waiting forever."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import psutil
import pytest
import torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling
from tests.engine.one_engine import OneEngine

TOKENS = [list(range(50, 90))]
OPTIONS = {"dtype": torch.float32, "max_length": 256, "load_format": "dummy", "multiprocessing": True}

EngineAndKill = tuple[VLLMEngine, Callable[[], None]]


@contextmanager
def started_engine(demo: Path) -> Iterator[EngineAndKill]:
    """Start an engine in a subprocess. Also returns a function that stops it immediately and kills it 2 s later."""
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


@pytest.fixture(scope="module")
def engine_and_kill(demo: Path, vllm: OneEngine) -> Iterator[EngineAndKill]:
    """The engine of the first tests. The last of them kills it."""
    vllm.stop()
    with started_engine(demo) as engine:
        yield engine


def require_equal_scores(engine: VLLMEngine, trainer: HFEngine) -> None:
    (scores,), (expected,) = (each.score(TOKENS, Sampling()) for each in (engine, trainer))
    assert scores[1:] == pytest.approx(expected[1:], abs=1e-4)


@pytest.mark.timeout(300)
def test_incomplete_refit_raises_until_next_refit(demo_trainer: HFEngine, engine_and_kill: EngineAndKill) -> None:
    (engine, _), model = engine_and_kill, demo_trainer.model
    assert not engine.capabilities().modules
    weights = dict(model.state_dict_adapter.iter_export(model))
    missing = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(MixedWeightsError, match=r"left \d+ tensors unwritten: model\.layers\.1.*without k_proj, "):
        engine.refit(((name, weights[name]) for name in weights if name != missing), bucket_bytes=2**21)
    with pytest.raises(MixedWeightsError, match="raises on every call"):
        engine.score(TOKENS, Sampling())
    report = engine.refit(weights.items(), bucket_bytes=2**21)
    assert report.buckets > 1
    assert not report.unwritten
    require_equal_scores(engine, demo_trainer)


@pytest.mark.timeout(300)
def test_engine_killed_during_generation_raises(engine_and_kill: EngineAndKill) -> None:
    engine, kill = engine_and_kill
    kill()
    with pytest.raises(EngineError, match="vLLM failed"):
        engine.generate(TOKENS, Sampling(), max_new_tokens=100, seed=0)
    engine.close()


@pytest.mark.timeout(300)
def test_engine_killed_during_refit_raises(demo: Path, demo_trainer: HFEngine, vllm: OneEngine) -> None:
    """The engine starts after the death of the previous test's engine."""
    vllm.stop()
    model = demo_trainer.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with started_engine(demo) as (engine, kill):

        def tensors() -> Iterator[NamedTensor]:
            for number, pair in enumerate(model.state_dict_adapter.iter_export(model)):
                if number == 5:
                    kill()
                yield pair

        assert engine.refit(model.state_dict_adapter.iter_export(model)).unwritten == ()
        require_equal_scores(engine, demo_trainer)
        with pytest.raises(EngineError, match=r"vLLM failed: .*its process has died.*restart it if it has died"):
            engine.refit(tensors(), bucket_bytes=2**18)
        with pytest.raises(EngineError, match="vLLM failed"):
            engine.score(TOKENS, Sampling())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
