"""Prefix caching in several versions of vLLM, each in a synthetic environment. A file contains the output of each."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.engines import start_engine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling

VLLM = """
import math, os
from types import SimpleNamespace as Is

__version__ = {version!r}
calls = []

class SamplingParams(Is):
    pass

class LLM:
    def __init__(self, **keywords):
        assert not {unknown!r} & keywords.keys(), f"unexpected keywords {{keywords}}"
        model = Is(dtype="torch.float32", max_model_len=keywords["max_model_len"], get_vocab_size=lambda: 512)
        cache = Is(enable_prefix_caching=keywords.get("enable_prefix_caching"))
        self.llm_engine = Is(vllm_config=Is(model_config=model, cache_config=cache))
        print("a line on standard output")

    def generate(self, prompts, sampling, use_tqdm):
        calls.append(prompts)
        if len(calls) == {dies}:
            os._exit(3)
        return [self.answer(prompt["prompt_token_ids"], how) for prompt, how in zip(prompts, sampling)]

    def answer(self, prompt, how):
        logprob = math.nan if len(calls) == {nan} else -0.25
        place = {{token: Is(logprob=logprob) for token in range(512)}}
        best = Is(token_ids=[7] * how.max_tokens, finish_reason="length", logprobs=None)
        if getattr(how, "logprobs", None) is not None:
            best.logprobs = [place] * how.max_tokens
        scored = getattr(how, "prompt_logprobs", None) is not None
        return Is(outputs=[best], prompt_logprobs=[None, *[place] * (len(prompt) - 1)] if scored else None)
"""

ARGUMENTS = """
from dataclasses import dataclass

@dataclass
class EngineArgs:
    {known}: str = ""
"""

Environment = Callable[..., Path]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Create an environment with a fake vLLM, which does not need torch."""

    def make(version: str, *, nan: int = 0, dies: int = 0, known: str = "logprobs_mode") -> Path:
        folder = tmp_path / version
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "vllm" / "engine").mkdir(parents=True)
        unknown = {"kv_cache_memory_bytes", "logprobs_mode"} - {known}
        (packages / "vllm" / "__init__.py").write_text(
            VLLM.format(version=version, nan=nan, dies=dies, unknown=unknown)
        )
        (packages / "vllm" / "engine" / "arg_utils.py").write_text(ARGUMENTS.format(known=known))
        (packages / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
        return folder

    return make


def diagnose(checkpoint: Path, *arguments: str) -> Result:
    base = ["diagnose", "prefix-caching", str(checkpoint), "--count", "20", "--new-tokens", "10"]
    return CliRunner().invoke(app, [*base, *arguments])


def test_report_lists_every_environment(llama_checkpoint: Path, environment: Environment, tmp_path: Path) -> None:
    good, bad, dead = environment("0.13.0"), environment("0.14.0", nan=2), environment("0.15.0", dies=2)
    names = [str(good), str(bad / "bin" / "python"), str(dead), str(tmp_path / "none")]
    options = [option for name in names for option in ("--engine-python", name)]
    result = diagnose(llama_checkpoint, *options, "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 1, result.output
    assert "10/10 logprobs are NaN on iteration 2 (prefix caching is broken in vLLM 0.14.0)" in result.output
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["verdict"] == "fail"
    rows = [(row["environment"], row["verdict"], row.get("engine")) for row in content["environments"]]
    assert rows == [
        (names[0], "pass", "vllm 0.13.0"),
        (names[1], "fail", "vllm 0.14.0"),
        (names[2], "incomplete", None),
        (names[3], "incomplete", None),
    ]
    assert "died (exit status 3)" in content["environments"][2]["error"]
    assert "no Python at" in content["environments"][3]["error"]
    assert content["environments"][0]["iterations"] == [
        {"prompt_tokens": 20, "tokens": 10, "nan": 0},
        {"prompt_tokens": 30, "tokens": 10, "nan": 0},
    ]


def test_passing_versions_exit_0(llama_checkpoint: Path, environment: Environment) -> None:
    """One version is too old for either of the keywords that newer versions are started with."""
    options = [
        "--engine-python",
        str(environment("0.9.2", known="model")),
        "--engine-python",
        str(environment("0.32.0")),
    ]
    result = diagnose(llama_checkpoint, *options)
    assert result.exit_code == 0, result.output
    assert result.output.count("PASS: prefix-caching: ") >= 2


def test_start_engine_with_vllm_of_other_environment(llama_checkpoint: Path, environment: Environment) -> None:
    path = environment("0.32.0")
    with start_engine("vllm", llama_checkpoint, python=path, max_length=64) as engine:
        known = engine.capabilities()
        assert (known.max_length, known.vocabulary, known.dtype) == (64, 512, torch.float32)
        (sample,) = engine.generate([[5, 6]], Sampling(), max_new_tokens=3)
        assert (sample.tokens, sample.logprobs) == ((7, 7, 7), (-0.25,) * 3)
        ((first, second),) = engine.score([[5, 6]], Sampling())
        assert math.isnan(first)
        assert second == -0.25
        with pytest.raises(EngineError, match="at temperature 1 only"):
            engine.score([[5, 6]], Sampling(0.5))


def test_vllm_errors_are_reported(llama_checkpoint: Path, environment: Environment) -> None:
    options: dict[str, Any] = {"python": environment("0.32.0"), "logprobs_mode": "raw_logprobs"}
    with pytest.raises(EngineError, match="KeyError: 'max_model_len'"):
        start_engine("vllm", llama_checkpoint, **options)
    with (
        start_engine("vllm", llama_checkpoint, max_length=64, **options) as engine,
        pytest.raises(EngineError, match="without temperature"),
    ):
        engine.generate([[5]], Sampling(0.5), max_new_tokens=3)
