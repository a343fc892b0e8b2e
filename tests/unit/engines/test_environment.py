"""The protocol with vLLM in another environment, whose interpreter is a script."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nrl_models.engines.processes.environment import EnvironmentEngine
from nrl_models.engines.processes.worker_engine import WorkerEngine
from nrl_models.engines.processes.worker_process import WorkerProcess
from nrl_models.errors import EngineError
from nrl_models.inputs.tokenizers import end_tokens
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs import Sampling

DESCRIBED = {
    "vllm": "0.32",
    "logprobs_mode": "processed_logprobs",
    "dtype": "float32",
    "max_model_len": 64,
    "vocabulary": 512,
    "prefix_caching": False,
}
SCRIPT = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
for number, answer in enumerate(json.loads((here / "answers.json").read_text())):
    request = sys.stdin.readline()
    with open(here / "seen.json", "a") as seen:
        seen.write(json.dumps([sys.argv, request]) + "\\n")
    if answer.startswith("{{"):
        answer = json.dumps({{"id": json.loads(request)["id"]}} | json.loads(answer))
    print(answer, flush=True)
"""


@pytest.fixture
def engine_with(tmp_path: Path) -> Callable[..., EnvironmentEngine]:
    """Create an engine whose worker sends these responses in order."""

    def start(*answers: Any) -> EnvironmentEngine:
        lines = [answer if isinstance(answer, str) else json.dumps(answer) for answer in answers]
        (tmp_path / "answers.json").write_text(json.dumps(lines))
        script = tmp_path / "python"
        script.write_text(SCRIPT.format(python=sys.executable))
        script.chmod(0o755)
        return EnvironmentEngine.start("model", python=script, hf_token="hunter2")

    return start


def sample(**changes: Any) -> dict[str, Any]:
    return {"samples": [{"tokens": [7, 8], "logprobs": [-1.0, None], "finish_reason": "length"} | changes]}


def test_options_are_not_command_line_arguments(engine_with: Callable[..., EnvironmentEngine], tmp_path: Path) -> None:
    with engine_with(DESCRIBED, sample()) as engine:
        (completion,) = engine.generate([[5, 6]], Sampling(), max_new_tokens=2)
        assert completion.tokens == (7, 8)
        assert completion.logprobs[0] == -1.0
        assert completion.logprobs[1] != completion.logprobs[1]
    (arguments, request), _ = map(json.loads, (tmp_path / "seen.json").read_text().splitlines())
    assert "hunter2" not in str(arguments)
    assert json.loads(request)["hf_token"] == "hunter2"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("vLLM says hello", "something that is not JSON: 'vLLM says hello"),
        ([], "it is a list, expected an object"),
        (DESCRIBED | {"vocabulary": None}, "vocabulary is None, expected a whole number from 1"),
        (DESCRIBED | {"dtype": 5}, "dtype is 5, expected a name"),
        ({"error": "ValueError: no such model"}, "failed: ValueError: no such model"),
        ({"error": "ValueError: 2 parameters:\na,\nb"}, "failed: ValueError: 2 parameters: a, b"),
    ],
)
def test_invalid_start_response_raises(
    engine_with: Callable[..., EnvironmentEngine], answer: Any, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        engine_with(answer)


def test_worker_crash_error_starts_with_last_output(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho a library was not found >&2\necho install ai2-olmo >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(EngineError) as raised:
        EnvironmentEngine.start("model", python=script)
    first, *others = str(raised.value).splitlines()
    assert first.endswith("died (exit status 3). Its last output: install ai2-olmo")
    assert others == ["  a library was not found"]
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(EngineError, match=r"Its last output: nothing$"):
        EnvironmentEngine.start("model", python=script)


def test_close_worker_that_died_before_first_request() -> None:
    worker = WorkerProcess([sys.executable, "-c", "raise SystemExit(3)"], "It", {})
    worker.process.wait()
    with pytest.raises(EngineError, match=r"It died \(exit status 3\)"):
        worker.ask({"path": "model"})
    worker.close()


def test_end_tokens_of_checkpoint_are_sent(
    engine_with: Callable[..., EnvironmentEngine], tmp_path: Path, checkpoint: Path
) -> None:
    """vLLM's generation configuration lacks the tokenizer's end token."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(512)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t9").save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5]}')
    with engine_with(DESCRIBED, sample(finish_reason="stop"), sample()) as engine:
        engine.path = str(folder)
        for ignore_end in (False, True):
            engine.generate([[5, 6]], Sampling(), max_new_tokens=2, ignore_end=ignore_end)
    _, *lines = (tmp_path / "seen.json").read_text().splitlines()
    requests = [json.loads(json.loads(line)[1]) for line in lines]
    assert [request["ends"] for request in requests] == [list(end_tokens(folder, read_config(folder))), None]
    assert {5, 9} <= {*requests[0]["ends"]}


UNREADABLE: list[tuple[Any, str]] = [
    ({}, "samples is None, expected a list"),
    ({"samples": []}, "the length of samples is 0, expected 1"),
    ({"samples": [None]}, r"samples\[0\] is None, expected an object"),
    (sample(tokens=[7, 512]), r"tokens\[1\] is 512, expected a whole number from 0 to 511"),
    (sample(logprobs=[-1.0]), r"the length of samples\[0\].logprobs is 1, expected 2"),
    (sample(logprobs=[-1.0, 2.0]), r"logprobs\[1\] is 2.0, expected a log-probability"),
]
"""Responses with invalid samples, and the error messages."""


@pytest.mark.parametrize(("answer", "message"), UNREADABLE)
def test_environment_engine_invalid_samples_raise(
    engine_with: Callable[..., EnvironmentEngine], answer: Any, message: str
) -> None:
    with engine_with(DESCRIBED, answer) as engine, pytest.raises(EngineError, match=message):
        engine.generate([[5, 6]], Sampling(), max_new_tokens=2)


class Worker(WorkerEngine):
    """An engine whose worker is replaced."""

    name = engine_name = "worker"


@pytest.mark.parametrize(("answer", "message"), UNREADABLE)
def test_worker_engine_invalid_samples_raise(answer: Any, message: str) -> None:
    engine = Worker(Mock(ask=lambda request: answer), {"vocabulary": 512, "dtype": "float32"}, None)
    with pytest.raises(EngineError, match=message):
        engine.generate([[5, 6]], Sampling(), max_new_tokens=2)
