"""A published pretrained model (SmolLM2-135M-Instruct) with a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import changed, clear_prefix_cache, model_of
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM
from nrl_models.cli import app
from nrl_models.consistency import weight_change
from nrl_models.consistency.cells import NOISE_FACTOR, Settings
from nrl_models.consistency.consistency_report import CellResult, ConsistencyReport
from nrl_models.consistency.matrix import run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts, load_tokenizer
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.diagnostics.engine_checks import diagnose_decode_vs_prefill, diagnose_precision, diagnose_prefix_caching
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.inputs.real_text import text_of_this_machine
from tests.engine.one_engine import OneEngine

SINGLE = Settings(
    lengths=(100,), data=("dummy",), modes=("greedy",), batches=(1,), new_tokens=16, threshold=1.0001, noise_factor=0.0
)
BATCH = replace(SINGLE, data=("real",), modes=("sampling",), batches=(4,))
LONG = replace(BATCH, lengths=(1_000,), batches=(1,))
HALF = replace(BATCH, lengths=(48,), batches=(2,), threshold=1.01, noise_factor=NOISE_FACTOR)
MAX_LENGTH = 1_001
"""Positions of the engine: the longest sequence, and one sampled token for scoring."""

Check = Callable[..., ConsistencyReport]


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> Prompts:
    """Prompts from a small part of the text, because tokenizing all of it takes longer than some tests."""
    return Prompts(load_tokenizer(smollm2), 49_152, text_of_this_machine(200_000))


@pytest.fixture
def check(smollm2: Path, prompts: Prompts, tmp_path: Path) -> Check:
    """Return a function that runs the matrix with a running engine, and a trainer in any precision."""

    def check(engine: VLLMEngine, dtype: torch.dtype, settings: Settings) -> ConsistencyReport:
        clear_prefix_cache(engine)
        trainer = HFEngine(AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype), "trainer")
        references = References(smollm2)
        meter = Meter(engine, trainer, prompts, settings, Store(tmp_path / "store", {}, fresh=True), references)
        return run_matrix(str(smollm2), meter, references)

    return check


def fp32_engine(vllm: OneEngine, path: Path) -> VLLMEngine:
    """The engine in fp32."""
    return vllm(path, max_length=MAX_LENGTH)


@pytest.mark.parametrize(
    "settings", [SINGLE, BATCH, pytest.param(LONG, marks=pytest.mark.long)], ids=["single", "batch", "long"]
)
def test_float32_matrix_passes(smollm2: Path, vllm: OneEngine, check: Check, settings: Settings) -> None:
    report = check(fp32_engine(vllm, smollm2), torch.float32, settings)
    assert report.passed, report.markdown()
    assert len(report.results) == len(settings.cells())
    assert max(result.worst[1] for result in report.results) <= 1.0001


def test_decode_vs_prefill_diagnostic_passes(smollm2: Path, vllm: OneEngine, prompts: Prompts) -> None:
    """Diagnostic 2."""
    batch = prompts.make(BATCH.cells()[0], 32, seed=0)[:2]
    result = diagnose_decode_vs_prefill(fp32_engine(vllm, smollm2), "SmolLM2", batch, new_tokens=64, threshold=1.0001)
    assert result.passed, result.lines


def test_prefix_caching_diagnostic_passes(smollm2: Path, vllm: OneEngine, prompts: Prompts) -> None:
    """Diagnostic 5. A pretrained model continues counting. The random models of other tests do not."""
    result = diagnose_prefix_caching(
        fp32_engine(vllm, smollm2), "SmolLM2", prompts.counting(100), new_tokens=24, decode=prompts.text
    )
    assert result.passed, result.lines
    assert any("101 102 103" in line for line in result.lines), result.lines
    assert result.measured["against_prefill"]["token_mult_prob_error"] < 1.0001


@pytest.mark.long
def test_backend_eager_matches_eager_logprobs(smollm2: Path, vllm: OneEngine, prompts: Prompts) -> None:
    """Diagnostic 4."""

    @contextmanager
    def start(mode: dict[str, Any]) -> Iterator[VLLMEngine]:
        options = {name: value for name, value in mode.items() if name != "enforce_eager" or not value}
        yield vllm(smollm2, max_length=MAX_LENGTH, **options)

    mode = "cuda graph mode lps with backend=eager"
    result = diagnose_precision(start, "SmolLM2", [prompts.counting(20)[:24]], new_tokens=8, modes=[mode])
    assert result.passed, result.lines


@pytest.mark.long
def test_bfloat16_noise_floor_detects_small_defect(smollm2: Path, vllm: OneEngine, prompts: Prompts) -> None:
    engine = vllm(smollm2, max_length=128, dtype=torch.bfloat16)

    def result(dtype: torch.dtype) -> CellResult:
        clear_prefix_cache(engine)
        trainer = HFEngine(AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype), "trainer")
        meter = Meter(engine, trainer, prompts, HALF, references=References(smollm2))
        cell = HALF.cells()[0]
        measurement = meter.measure(cell)
        return CellResult.of(cell, (measurement,), HALF)

    for dtype in (torch.bfloat16, torch.float32):
        cell_result = result(dtype)
        assert cell_result.passed, cell_result.problems
        assert cell_result.repeats[0].noise_dtype == torch.bfloat16
        assert cell_result.notes
    norm = model_of(engine).model.layers[5].input_layernorm.weight
    with changed(norm, norm * 1.2):
        cell_result = result(torch.bfloat16)
    assert "what the noise floor of" in cell_result.problems[0], cell_result.to_json()
    clear_prefix_cache(engine)


def command(*arguments: str, file: Path) -> Any:
    """Run a command, which starts an engine, and return its JSON."""
    result = CliRunner().invoke(app, [*arguments, "--dtype", "float32", "--json", str(file)])
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())


@pytest.mark.long
def test_refit_check_command(smollm2: Path, vllm: OneEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.stop()
    monkeypatch.setattr(weight_change, "OBSERVING_SECONDS", 3.0)  # tests of tiny models observe every tensor
    arguments = ["refit-check", str(smollm2), "--threshold", "1.0001", "--length", "64", "--batch", "2"]
    content = command(*arguments, file=tmp_path / "found.json")
    assert [refit["token_mult_prob_error"] <= 1.0001 for refit in content["refits"]] == [True, True]
    assert content["refits"][1]["before"] > 1.01


def test_max_model_len_diagnostic_passes(smollm2: Path, vllm: OneEngine, tmp_path: Path) -> None:
    """Diagnostic 1."""
    vllm.stop()
    content = command("diagnose", "max-model-len", str(smollm2), file=tmp_path / "found.json")
    assert content["total_tokens"] == 20


@pytest.mark.long
def test_prefix_caching_diagnostic_in_external_environment(smollm2: Path, vllm: OneEngine, tmp_path: Path) -> None:
    """The environment is this one, through another path. Its vLLM runs in a subprocess all the same."""
    vllm.stop()
    environment = tmp_path / "another"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    arguments = ["diagnose", "prefix-caching", str(smollm2), "--count", "100", "--new-tokens", "8"]
    content = command(*arguments, "--engine-python", str(environment), file=tmp_path / "found.json")
    (version,) = content["environments"]
    assert version["engine"].startswith("vllm 0.")
    assert version["against_prefill"]["token_mult_prob_error"] < 1.0001
