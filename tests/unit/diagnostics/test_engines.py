"""Diagnostics 1, 2, 4 and 5 with transformers as the engine. tests/engine runs them with vLLM."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.consistency.prompts import Prompts
from nrl_models.diagnostics.engine_checks import (
    diagnose_decode_vs_prefill,
    diagnose_max_model_len,
    diagnose_precision,
    diagnose_prefix_caching,
)
from nrl_models.diagnostics.lengths import counting_prompt, fitting_lengths
from nrl_models.diagnostics.result import Diagnosis
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import ConsistencyError, EngineError, UnknownArgumentError
from tests.unit.printed import unframed

PROMPT = list(range(20, 44))


@pytest.fixture
def engine(llama_checkpoint: Path) -> HFEngine:
    """transformers' model as an engine. Tests may change it."""
    return HFEngine.start(llama_checkpoint, dtype=torch.float32)


def test_engine_without_length_limit_raises(engine: HFEngine) -> None:
    with pytest.raises(EngineError, match="no length limit"):
        diagnose_max_model_len(engine, "tiny", PROMPT)


@pytest.mark.parametrize(("limit", "passed"), [(20, True), (13, False)])
def test_max_model_len_counts_prompt_and_generated_tokens(engine: HFEngine, limit: int, passed: bool) -> None:
    known = replace(engine.capabilities(), own_limit=True, max_length=limit)
    engine.capabilities = lambda: known
    generate = HFEngine(engine.model).generate
    # The engine stops at 20 tokens and ignores the request.
    engine.generate = lambda prompts, sampling, **options: generate(
        prompts, sampling, max_new_tokens=20 - len(prompts[0])
    )
    result = diagnose_max_model_len(engine, "tiny", PROMPT)
    assert result.passed == passed
    assert result.measured["total_tokens"] == 20
    content = result.to_json()
    assert (content["value"], content["bound"], content["unit"]) == (20, limit, "count")


def test_decode_and_prefill_agree(engine: HFEngine) -> None:
    result = diagnose_decode_vs_prefill(engine, "tiny", [PROMPT, PROMPT[:5]], new_tokens=20, threshold=1.0001)
    assert result.passed, result.lines
    assert [sequence["tokens"] for sequence in result.measured["sequences"]] == [20, 20]


def test_error_of_one_sequence_is_not_diluted(engine: HFEngine) -> None:
    generate = engine.generate

    def spoiled(*args: Any, **kwargs: Any) -> list[Sample]:
        first, second = generate(*args, **kwargs)
        return [first, replace(second, logprobs=tuple(logprob - 0.06 for logprob in second.logprobs))]

    engine.generate = spoiled
    # exp(0.06) is 1.062 over the generated tokens. Averaged with 200 prompt tokens it would be 1.002.
    prompts = [PROMPT, [token % 480 + 16 for token in range(200)]]
    result = diagnose_decode_vs_prefill(engine, "tiny", prompts, new_tokens=8)
    assert not result.passed
    assert "differ for prompts [1]" in result.lines[-1]
    assert result.measured["sequences"][1]["token_mult_prob_error"] == pytest.approx(math.exp(0.06), abs=1e-4)
    content = result.to_json()
    assert content["value"] == result.measured["sequences"][1]["token_mult_prob_error"]
    assert (content["bound"], content["unit"]) == (result.measured["threshold"], "token_mult_prob_error")


def test_zero_probability_in_prefill_fails(engine: HFEngine) -> None:
    score = engine.score

    def excluding(*args: Any, **kwargs: Any) -> list[list[float]]:
        return [[*row[:-3], *[-math.inf] * 3] for row in score(*args, **kwargs)]

    engine.score = excluding
    result = diagnose_decode_vs_prefill(engine, "tiny", [PROMPT], new_tokens=8)
    assert not result.passed
    assert "3 with probability 0 in the prefill" in result.lines[0]


def test_empty_prompts_raise(engine: HFEngine) -> None:
    with pytest.raises(UnknownArgumentError, match="prompts is empty"):
        diagnose_decode_vs_prefill(engine, "tiny", [])


def test_engine_crash_is_not_a_length_limit(engine: HFEngine) -> None:
    known = replace(engine.capabilities(), own_limit=True, max_length=20)
    engine.capabilities = lambda: known
    generate, dead = engine.generate, False

    def refuse(prompts: Any, sampling: Any, *, max_new_tokens: int, **options: Any) -> list[Sample]:
        if dead or max_new_tokens > 12:
            raise EngineError("died" if dead else "too long")
        return generate(prompts, sampling, max_new_tokens=max_new_tokens)

    engine.generate = refuse
    assert diagnose_max_model_len(engine, "tiny", PROMPT).passed
    dead = True
    with pytest.raises(EngineError, match="died"):
        diagnose_max_model_len(engine, "tiny", PROMPT)


def test_precision_modes_are_compared_on_same_tokens(llama_checkpoint: Path) -> None:
    modes = ["cuda graph mode lps", "cuda graph mode lps with backend=eager"]

    @contextmanager
    def start(mode: dict[str, Any]) -> Iterator[HFEngine]:
        dtype = torch.bfloat16 if mode.get("compilation_config") else torch.float32
        yield HFEngine.start(llama_checkpoint, dtype=dtype)

    result = diagnose_precision(start, "tiny", [PROMPT, PROMPT[:9]], new_tokens=6, modes=modes)
    assert not result.passed
    assert result.informative
    close = {comparison["comparison"]: comparison["close"] for comparison in result.measured["comparisons"]}
    assert close == {
        "Eager and cuda graph mode lps (prompt lps)": True,
        "Eager and cuda graph mode lps (generation lps)": True,
        "Eager and cuda graph mode lps with backend=eager (prompt lps)": False,
        "Eager and cuda graph mode lps with backend=eager (generation lps)": False,
    }
    assert [comparison["elements"] for comparison in result.measured["comparisons"][:2]] == [23 + 8, 12]
    # The guide's code with both arrays. Shorter sequences are padded with NaN.
    lines = result.lines
    assert "Eager and cuda graph mode lps (prompt lps): PASSED - Arrays are close within tolerance" in "\n".join(lines)
    index = lines.index("Eager and cuda graph mode lps with backend=eager (prompt lps): FAILED - Arrays are different")
    assert lines[index - 1] == "=" * 100
    assert lines[index + 1 : index + 3] == [
        "Detailed error:",
        "Not equal to tolerance rtol=0.001, atol=0.001",
    ]
    assert re.fullmatch(r"Mismatched elements: \d+ / 46 \(.*%\)", lines[index + 3])
    arrays = [line.partition(":")[0] for line in lines[index:] if re.match("(ACTUAL|DESIRED): array", line)]
    assert arrays == ["ACTUAL", "DESIRED"] * 2


def test_prefix_caching_counts_nan(engine: HFEngine) -> None:
    known = replace(engine.capabilities(), prefix_caching=True)
    engine.capabilities = lambda: known
    assert diagnose_prefix_caching(engine, "tiny", PROMPT, new_tokens=10).passed
    generate = engine.generate

    def spoiled(prompts: Any, *args: Any, **kwargs: Any) -> list[Sample]:
        sample = generate(prompts, *args, **kwargs)[0]
        keep = len(sample.tokens) if len(prompts[0]) == len(PROMPT) else 1
        return [replace(sample, logprobs=(*sample.logprobs[:keep], *[math.nan] * (len(sample.tokens) - keep)))]

    engine.generate = spoiled
    result = diagnose_prefix_caching(engine, "tiny", PROMPT, new_tokens=10)
    assert not result.passed
    assert (
        result.lines[-1]
        == "FAIL: prefix-caching: tiny: 9/10 logprobs are NaN on iteration 2 (prefix caching is broken)"
    )
    assert f"Iteration 1 — prompt length: {len(PROMPT)} tokens" in result.lines
    assert [iteration["nan"] for iteration in result.measured["iterations"]] == [0, 9]
    content = result.to_json()
    assert (content["value"], content["bound"], content["unit"]) == (9, 0, "count")


@pytest.mark.parametrize(("shift", "threshold", "passed"), [(0.2, 1.05, False), (0.2, 1.3, True), (math.inf, 2, False)])
def test_prefix_caching_compares_with_prefill(engine: HFEngine, shift: float, threshold: float, passed: bool) -> None:
    known, generate, calls = replace(engine.capabilities(), prefix_caching=True), engine.generate, []
    engine.capabilities = lambda: known

    def stale(*args: Any, **options: Any) -> list[Sample]:
        (sample,) = generate(*args, **options)
        calls.append(sample)
        last = sample.logprobs[-1] - shift
        values = [value - 0.2 for value in sample.logprobs[:-1]]
        return [replace(sample, logprobs=(*values, last))] if len(calls) == 2 else [sample]

    engine.generate = stale
    result = diagnose_prefix_caching(engine, "tiny", PROMPT, new_tokens=10, threshold=threshold)
    assert result.passed == passed, result.lines
    content = result.to_json()
    assert (content["value"], content["bound"]) == (pytest.approx(math.exp(0.2), abs=1e-4), threshold)
    if not passed:
        assert "FAIL: prefix-caching: tiny: cached tokens and one prefill differ: token_mult_prob_" in result.lines[-1]
        assert (", 1 tokens with probability 0 or NaN" in result.lines[-1]) == math.isinf(shift)


def test_decode_vs_prefill_command(llama_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["--engine", "hf-generate", "--dtype", "float32"]
    arguments += ["--prompts", "2", "--length", "12", "--new-tokens", "8"]
    result = CliRunner().invoke(
        app, ["diagnose", "decode-vs-prefill", str(llama_checkpoint), *arguments, "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    assert "PASS: decode-vs-prefill: " in result.output
    assert json.loads(file.read_text())["verdict"] == "pass"


def test_precision_command_exits_0_if_modes_differ(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = Diagnosis("precision", "tiny", informative=True).finish("6 of 6 comparisons differ; see above")
    monkeypatch.setattr("nrl_models.diagnostics.engine_checks.diagnose_precision", lambda *args, **kwargs: diagnosis)
    result = CliRunner().invoke(app, ["diagnose", "precision", str(llama_checkpoint)])
    assert result.exit_code == 0, result.output
    assert "6 of 6 comparisons differ" in result.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("max-model-len", "does not enforce a length limit: expected vllm, vllm-transformers or a server URL"),
        ("precision", "no compiled modes that can be selected: expected vllm or vllm-transformers"),
        ("prefix-caching", "runs without prefix caching: expected vllm or vllm-transformers"),
    ],
)
def test_unsupported_engine_exits_before_start(llama_checkpoint: Path, name: str, reason: str) -> None:
    for engine in ("hf-generate", "mlx", "megatron"):
        result = CliRunner().invoke(app, ["diagnose", name, str(llama_checkpoint), "--engine", engine])
        assert result.exit_code == 2
        for words in (f"{engine} ", reason, "make engine"):
            assert words in unframed(result.output)


@pytest.mark.parametrize(
    ("limit", "prompt", "new", "lengths"),
    [
        (None, None, None, (13_990, 2_048)),
        (100_000, None, None, (13_990, 2_048)),
        (8_191, None, None, (6_337, 927)),
        (8_191, 5_000, None, (5_000, 1_595)),
        (8_191, None, 100, (7_991, 100)),
        (8_191, 5_000, 100, (5_000, 100)),
    ],
)
def test_lengths_are_fitted_to_model_limit(
    limit: int | None, prompt: int | None, new: int | None, lengths: tuple[int, int]
) -> None:
    assert fitting_lengths(limit, prompt, new, usual=(13_990, 2_048), turns=2) == lengths


def test_requested_lengths_above_limit_raise() -> None:
    with pytest.raises(ConsistencyError, match=r"13,990 tokens and 2 answers of 2,048 need 18,086 positions.* 8,191"):
        fitting_lengths(8_191, 13_990, 2_048, usual=(1, 1), turns=2)


def test_counting_prompt_is_truncated_to_limit() -> None:
    source = Prompts(None, 512)
    assert counting_prompt(source.counting, 300, 400) == (source.counting(300), 300)
    tokens, reached = counting_prompt(source.counting, 300, 123)
    assert (len(tokens), reached) == (123, 123)
