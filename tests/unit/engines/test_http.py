from __future__ import annotations

import math
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from completions_server import Served, serving
from test_interrupted_calls import interrupted

from nrl_models.engines import start_engine
from nrl_models.engines.engine_types import prompt_seeds
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.http import HTTPEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling

Server = tuple[HTTPEngine, Served]


@pytest.fixture(params=["vllm", "openai"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Server]:
    """An engine connected to a server of either style, and the object that controls the server's behavior."""
    with serving(HFEngine.start(checkpoint, dtype=torch.float32), request.param) as (address, served):
        yield start_engine(address, checkpoint, timeout=20), served


@pytest.mark.long
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.7, top_k=30, top_p=0.9)], ids=str)
def test_generation(server: Server, trainer: HFEngine, prompts: list[list[int]], sampling: Sampling) -> None:
    engine, served = server
    samples = engine.generate(prompts, sampling, max_new_tokens=9, seed=4)
    seeds = prompt_seeds(4, len(prompts))
    expected = [
        served.engine.generate([prompt], sampling, max_new_tokens=9, seed=seed)[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    scores = trainer.score([sample.sequence for sample in samples], sampling)
    for sample, score in zip(samples, scores, strict=True):
        assert score[len(sample.prompt) :] == pytest.approx(sample.logprobs, abs=1e-4)


def test_equal_prompts_have_different_completions(server: Server) -> None:
    engine, _ = server
    samples = engine.generate([[1, 2, 3]] * 4, Sampling(), max_new_tokens=6, seed=1)
    assert len({sample.tokens for sample in samples}) == 4
    assert samples == engine.generate([[1, 2, 3]] * 4, Sampling(), max_new_tokens=6, seed=1)
    later = engine.generate([[1, 2, 3]] * 4, Sampling(), max_new_tokens=6, seed=2)
    assert not {sample.tokens for sample in samples} & {sample.tokens for sample in later}


def test_requests_do_not_read_certificates_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = server

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("this takes 16 ms")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", fail)
    assert engine.generate([[1, 2, 3]], Sampling(0.0), max_new_tokens=2)


def test_scores(server: Server, trainer: HFEngine, prompts: list[list[int]]) -> None:
    engine, _ = server
    for score, expected in zip(engine.score(prompts, Sampling()), trainer.score(prompts, Sampling()), strict=True):
        assert math.isnan(score[0])
        assert score[1:] == pytest.approx(expected[1:], abs=1e-4)
    with pytest.raises(EngineError, match="temperature 1 only"):
        engine.score(prompts, Sampling(0.5))
    with pytest.raises(EngineError, match="expects a Sampling"):
        engine.score(prompts, {"temperature": 1.0})


def test_missing_finish_reason_is_unfinished(server: Server, prompts: list[list[int]]) -> None:
    engine, served = server
    served.change = lambda choice: choice | {"finish_reason": None}
    samples = engine.generate(prompts, Sampling(), max_new_tokens=3)
    assert {sample.finish_reason for sample in samples} == {"unfinished"}


def test_capabilities(server: Server) -> None:
    engine, served = server
    capabilities = engine.capabilities()
    assert capabilities.vocabulary == 512
    assert capabilities.max_length == (256 if served.style == "vllm" else None)
    assert capabilities.refit
    assert not capabilities.modules
    assert engine.describe()["model"] == "tiny"


def without_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return choice | {"logprobs": None}


def text_only(choice: dict[str, Any]) -> dict[str, Any]:
    choice.pop("token_ids", None)
    choice["logprobs"]["tokens"] = ["the"] * len(choice["logprobs"]["tokens"])
    return choice


def one_logprob_too_few(choice: dict[str, Any]) -> dict[str, Any]:
    choice["logprobs"]["token_logprobs"].pop()
    return choice


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_logprobs, r"0 log-probabilities for 5|tokens as text only"),
        (text_only, "tokens as text only"),
        (one_logprob_too_few, "4 log-probabilities for 5"),
    ],
)
def test_server_without_logprobs_raises(server: Server, prompts: list[list[int]], change: Any, message: str) -> None:
    engine, served = server
    served.change = change
    with pytest.raises(EngineError, match=message):
        engine.generate(prompts, Sampling(), max_new_tokens=5)


def test_server_without_scoring_raises(server: Server, prompts: list[list[int]]) -> None:
    engine, served = server
    served.change = lambda choice: without_logprobs(choice) | {"prompt_logprobs": None}
    with pytest.raises(EngineError, match="neither `prompt_logprobs` nor `echo`"):
        engine.score(prompts, Sampling())


def test_null_logprob_is_nan(server: Server, prompts: list[list[int]]) -> None:
    engine, served = server

    def broken(choice: dict[str, Any]) -> dict[str, Any]:
        choice["logprobs"]["token_logprobs"][-1] = None
        return choice

    served.change = broken
    assert math.isnan(engine.generate(prompts, Sampling(), max_new_tokens=5)[1].logprobs[-1])


def test_server_ignoring_ignore_eos_raises(server: Server, prompts: list[list[int]]) -> None:
    engine, served = server
    first = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=5)[0]
    served.engine.model.generation_config.eos_token_id = first.tokens[1]
    original = served.complete
    served.complete = lambda body: original(body | {"ignore_eos": False})  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="ignores `ignore_eos`"):
        engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=5)


def test_server_with_lower_max_new_tokens_raises(server: Server, prompts: list[list[int]]) -> None:
    """vLLM applies the `max_new_tokens` of its generation configuration to every request."""
    engine, served = server
    original = served.complete

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        return original(body | {"max_tokens": min(body["max_tokens"], 4)})

    served.complete = complete  # type: ignore[method-assign]
    for ignore_end in (True, False):
        with pytest.raises(
            EngineError, match=r"stopped sequences \[0, 1, 2\] at its own limit, after \[4, 4, 4\] tokens"
        ):
            engine.generate(prompts, Sampling(), max_new_tokens=5, ignore_end=ignore_end)
    assert len(engine.generate(prompts, Sampling(), max_new_tokens=4)) == len(prompts)


def test_numpy_token_ids_and_empty_prompts(server: Server, prompts: list[list[int]]) -> None:
    engine, _ = server
    arrays = [list(np.array(prompt)) for prompt in prompts]
    expected = engine.generate(prompts, Sampling(), max_new_tokens=3)
    samples = engine.generate(arrays, Sampling(), max_new_tokens=3)
    assert samples == expected
    assert {type(token) for sample in samples for token in sample.sequence} == {int}
    scores = [engine.score(rows, Sampling()) for rows in (prompts, arrays)]
    assert [row[1:] for row in scores[0]] == [row[1:] for row in scores[1]]
    assert engine.generate([], Sampling(), max_new_tokens=3) == engine.score([], Sampling()) == []


def test_slow_server_times_out(checkpoint: Path, prompts: list[list[int]]) -> None:
    with serving(HFEngine.start(checkpoint, dtype=torch.float32)) as (address, served):
        engine = start_engine(address, checkpoint, timeout=0.5)
        served.delay = 1.5
        with pytest.raises(EngineError, match=r"did not answer within 0.5 s.*timeout=SECONDS"):
            engine.generate(prompts, Sampling(), max_new_tokens=5)


def test_server_crash_error_names_address(server: Server, prompts: list[list[int]]) -> None:
    engine, served = server
    served.broken = True
    with pytest.raises(EngineError, match=f"{engine.address} cannot be reached, or has died"):
        engine.generate(prompts, Sampling(), max_new_tokens=5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["generate", "score"])
def test_call_after_interrupt(server: Server, prompts: list[list[int]], name: str) -> None:
    """Each call has its own connections, which an interrupt closes: no answer belongs to a later call."""
    engine, served = server
    calls: dict[str, Any] = {
        "generate": lambda given: engine.generate(given, Sampling(), max_new_tokens=4, seed=1),
        "score": lambda given: [row[1:] for row in engine.score(given, Sampling())],
    }
    expected = {key: call(prompts) for key, call in calls.items()}
    served.delay = 0.6
    with interrupted(0.3):
        calls[name]([[9, 8, 7], [6, 5]])
    served.delay = 0.0
    assert {key: call(prompts) for key, call in calls.items()} == expected


def test_unreachable_server_raises(checkpoint: Path) -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        start_engine("http://127.0.0.1:9", checkpoint)


def test_server_error_message_is_shown(server: Server, prompts: list[list[int]]) -> None:
    engine, served = server
    served.complete = lambda body: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(EngineError, match=r"answered 400.*division by zero"):
        engine.generate(prompts, Sampling(), max_new_tokens=5)


def test_server_with_several_models_requires_model_option(server: Server, checkpoint: Path) -> None:
    engine, served = server
    served.models = ["one", "two"]
    with pytest.raises(EngineError, match="serves one, two; say which"):
        start_engine(engine.address, checkpoint)
    with pytest.raises(EngineError, match="'three' is not among them"):
        start_engine(engine.address, checkpoint, model="three")
    assert start_engine(engine.address + "/v1/", checkpoint, model="two").model == "two"


def test_unknown_options_raise(server: Server, checkpoint: Path) -> None:
    with pytest.raises(EngineError, match="a server has no option enforce_eager"):
        start_engine(server[0].address, checkpoint, enforce_eager=True)
