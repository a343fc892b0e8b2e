"""The trained demo checkpoint with a real engine: the matrix, refits, diagnostics, and their commands."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inside import changed, model_of
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM
from nrl_models.cli import app
from nrl_models.consistency.cells import Settings
from nrl_models.consistency.matrix import run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.diagnostics.engine_checks import (
    diagnose_decode_vs_prefill,
    diagnose_max_model_len,
    diagnose_precision,
    diagnose_prefix_caching,
)
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling

Vllm = Callable[..., VLLMEngine]

EVERY_KIND = Settings(lengths=(100,), batches=(1, 8, 32), new_tokens=16, strict=True)
"""Both kinds of data and sampling, with every batch size."""

FEW = Settings(lengths=(100,), batches=(8,), new_tokens=32)

LONG = Settings(lengths=(1_000,), data=("real",), batches=(2,), new_tokens=32)


@pytest.mark.parametrize(
    ("dtype", "bound", "matrix"),
    [(torch.float32, 1.0001, (EVERY_KIND, LONG)), (torch.bfloat16, 1.01, (FEW,))],
    ids=["float32", "bfloat16"],
)
def test_matrix_passes(
    demo: Path,
    vllm: Vllm,
    demo_prompts: Prompts,
    tmp_path: Path,
    dtype: torch.dtype,
    bound: float,
    matrix: tuple[Settings, ...],
) -> None:
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(demo, dtype=dtype), "trainer")
    engine = vllm(demo, dtype=dtype, max_length=1_001)
    for number, settings in enumerate(matrix):
        settings = replace(settings, threshold=bound)
        store = Store(tmp_path / str(number), asdict(settings))
        report = run_matrix(str(demo), Meter(engine, trainer, demo_prompts, settings, store), References(demo))
        assert report.verdict == "pass", report.markdown()
        assert len(report.results) == len(settings.cells())
        for result in report.results:
            assert result.comparisons.keys() >= {"decode", "prefill"}
            assert math.isfinite(result.noise)


def test_refit_check_command(demo: Path, vllm: Vllm, tmp_path: Path) -> None:
    vllm.stop()
    file = tmp_path / "refit.json"
    arguments = ["refit-check", str(demo), "--dtype", "float32", "--threshold", "1.0001", "--bucket-mb", "1"]
    result = CliRunner().invoke(app, [*arguments, "--length", "64", "--batch", "2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert [refit["name"] for refit in content["refits"]] == ["from random weights", "after a training step"]
    for refit in content["refits"]:
        assert refit["before"] > 1.01
        assert refit["token_mult_prob_error"] <= 1.0001
        assert refit["report"]["largest_bucket"] <= 4.3e6  # the embedding is larger than a bucket
        assert refit["report"]["buckets"] > 3
        assert refit["report"]["unwritten"] == []


@pytest.mark.parametrize("fault", ["a shape", "the trainer"])
def test_failed_refit_raises_until_next_refit(vllm: Vllm, make_checkpoint: Callable[..., Path], fault: str) -> None:
    vllm.stop()
    checkpoint = make_checkpoint(LlamaConfig, LlamaForCausalLM)
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(checkpoint), "trainer")
    model = trainer.model
    tokens = [list(range(50, 90)), list(range(300, 340))]
    weights = dict(model.state_dict_adapter.iter_export(model))

    def half_of_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(weights.items()):
            # In the middle of a layer, and of a fused tensor in vLLM.
            if name.endswith("layers.1.self_attn.v_proj.weight"):
                if fault == "the trainer":
                    raise OSError("the trainer's disk")
                yield name, tensor[:-1]
            yield name, tensor * (1 + number % 2)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("the trainer's disk")
        yield

    expected = torch.tensor(trainer.score(tokens, Sampling()))[:, 1:]
    with VLLMEngine.start(checkpoint, dtype=torch.float32, max_length=64) as engine:
        error, words = (OSError, "disk") if fault == "the trainer" else (MixedWeightsError, "refit it again")
        before = [row[1:] for row in engine.score(tokens, Sampling())]
        with pytest.raises(OSError, match="disk"):  # before any layer has all its weights
            engine.refit(chain(list(weights.items())[2:3], failing()), bucket_bytes=1)
        assert [row[1:] for row in engine.score(tokens, Sampling())] == before
        with pytest.raises(error, match=words):
            engine.refit(half_of_weights(), bucket_bytes=2**16)
        parameters = dict(model_of(engine).named_parameters())
        assert not any(parameter.is_meta for parameter in parameters.values())
        for call in (
            lambda: engine.score(tokens, Sampling()),
            lambda: engine.generate(tokens, Sampling(), max_new_tokens=2),
            lambda: engine.module_calls(tokens[0]),
        ):
            with pytest.raises(MixedWeightsError, match=r"parts of version 0 of the weights and parts of version 1"):
                call()
        report = engine.refit(weights.items(), bucket_bytes=2**16)
        assert not report.unwritten
        assert (torch.tensor(engine.score(tokens, Sampling()))[:, 1:] - expected).abs().max() < 1e-4


def test_vllm_preserves_random_states(vllm: Vllm, make_checkpoint: Callable[..., Path]) -> None:
    vllm.stop()
    checkpoint = make_checkpoint(LlamaConfig, LlamaForCausalLM)

    def states() -> list[str]:
        return [str(random.getstate()), str(numpy.random.get_state()), str(torch.get_rng_state().tolist())]

    before = states()
    with VLLMEngine.start(checkpoint, dtype=torch.float32, max_length=64, seed=5) as engine:
        assert states() == before
        engine.generate([[50, 51, 52]], Sampling(), max_new_tokens=4)
        engine.score([[50, 51, 52]], Sampling())
        assert states() == before
    assert states() == before


def test_seed_determines_samples_with_chunked_prefill(demo: Path, vllm: Vllm, demo_prompts: Prompts) -> None:
    engine = vllm(demo, max_num_batched_tokens=32, enable_prefix_caching=False)
    prompts = [demo_prompts.counting(60)[:50], demo_prompts.counting(60)[9:59]]
    state = torch.random.get_rng_state()
    first, again, other = (engine.generate(prompts, Sampling(), max_new_tokens=8, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[0].tokens != first[1].tokens
    assert torch.equal(torch.random.get_rng_state(), state)


# Diagnostics


def test_max_model_len_diagnostic_passes(demo: Path, vllm: Vllm, demo_prompts: Prompts) -> None:
    engine = vllm(demo, max_length=20)
    result = diagnose_max_model_len(engine, "demo", demo_prompts.counting(20))
    assert result.passed
    assert result.measured["total_tokens"] == 20
    assert result.lines == ["Prompt tokens: 8", "Generated tokens: 12", "Total tokens: 20", "PASS: max-model-len: demo"]


def test_max_model_len_diagnostic_fails_if_exceeded(
    demo: Path, vllm: Vllm, demo_prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vllm(demo)
    capabilities = engine.capabilities()
    # An engine that reports 20 and continues to 256.
    monkeypatch.setattr(engine, "capabilities", lambda: replace(capabilities, max_length=20))
    result = diagnose_max_model_len(engine, "demo", demo_prompts.counting(20))
    assert not result.passed
    assert result.lines[-1] == "FAIL: max-model-len: demo: 28 tokens, and max_model_len is 20"


def test_decode_vs_prefill_diagnostic_passes(demo: Path, vllm: Vllm, demo_prompts: Prompts) -> None:
    prompts = [demo_prompts.counting(20)[:24], demo_prompts.counting(40)[30:60]]
    result = diagnose_decode_vs_prefill(vllm(demo), "demo", prompts, new_tokens=100, threshold=1.0001)
    assert result.passed, result.lines
    assert [sequence["tokens"] for sequence in result.measured["sequences"]] == [100, 100]


def test_decode_vs_prefill_diagnostic_fails_with_wrong_positions(demo: Path, vllm: Vllm, demo_prompts: Prompts) -> None:
    engine = vllm(demo)

    def with_zero_positions(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = kwargs["positions"]
        return (args, kwargs | {"positions": torch.zeros_like(positions)}) if len(positions) == 1 else None

    handle = model_of(engine).register_forward_pre_hook(with_zero_positions, with_kwargs=True)
    try:
        # The demo's model is small, so wrong positions change its log-probabilities little.
        prompt = demo_prompts.counting(20)[:24]
        result = diagnose_decode_vs_prefill(engine, "demo", [prompt], new_tokens=100, threshold=1.001)
    finally:
        handle.remove()
        engine.llm.reset_prefix_cache()
    assert not result.passed
    assert "decoding and prefill differ for prompts [0]" in result.lines[-1]


def test_backend_eager_matches_eager_logprobs(demo: Path, vllm: Vllm, demo_prompts: Prompts) -> None:
    vllm.stop()

    @contextmanager
    def start(mode: dict[str, Any]) -> Iterator[VLLMEngine]:
        with VLLMEngine.start(demo, dtype=torch.float32, max_length=64, **mode) as engine:
            yield engine

    mode = "cuda graph mode lps with backend=eager"
    result = diagnose_precision(start, "demo", [demo_prompts.counting(20)[:24]], new_tokens=16, modes=[mode])
    assert result.informative
    assert result.passed, result.lines
    assert [comparison["elements"] for comparison in result.measured["comparisons"]] == [23, 16]


def test_precision_diagnostic_reports_differing_mode(
    demo: Path, vllm: Vllm, demo_prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nrl_models.diagnostics import engine_checks

    monkeypatch.setitem(engine_checks.MODES, "half as precise", {"dtype": torch.bfloat16})

    @contextmanager
    def start(mode: dict[str, Any]) -> Iterator[VLLMEngine]:
        yield vllm(demo, **({"max_length": 128} | {key: value for key, value in mode.items() if key == "dtype"}))

    prompt = demo_prompts.counting(20)[:24]
    result = diagnose_precision(start, "demo", [prompt], new_tokens=16, modes=["half as precise"], tolerance=1e-5)
    assert not result.passed
    assert any("FAILED - Arrays are different" in line for line in result.lines)


def test_prefix_caching_diagnostic_passes(demo: Path, vllm: Vllm, demo_prompts: Prompts) -> None:
    engine = vllm(demo, max_length=1_001)
    result = diagnose_prefix_caching(engine, "demo", demo_prompts.counting(100), new_tokens=150)
    assert result.passed, result.lines
    assert result.measured["against_prefill"]["token_mult_prob_error"] < 1.0001


def test_prefix_caching_diagnostic_fails_with_nan(demo: Path, vllm: Vllm, demo_prompts: Prompts) -> None:
    engine = vllm(demo, max_length=1_001)
    weight = model_of(engine).model.norm.weight
    prompt = demo_prompts.counting(100)
    generate, calls = engine.generate, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            return generate(*args, **kwargs)
        with changed(weight, torch.full_like(weight, torch.nan)):
            return generate(*args, **kwargs)

    engine.generate = broken
    try:
        result = diagnose_prefix_caching(engine, "demo", prompt, new_tokens=150, decode=demo_prompts.text)
    finally:
        del engine.generate
        engine.llm.reset_prefix_cache()
    assert not result.passed
    assert "150/150 logprobs are NaN on iteration 2" in result.lines[-1]
    assert any("token[0] id=" in line and "logprob=nan" in line for line in result.lines)


def test_prefix_caching_diagnostic_without_cache_raises(demo_trainer: HFEngine) -> None:
    with pytest.raises(EngineError, match="runs without prefix caching"):
        diagnose_prefix_caching(demo_trainer, "demo", [5, 6, 7])
