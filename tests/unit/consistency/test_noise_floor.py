"""An error above the threshold passes only if the lower precision explains it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_cell import SETTINGS
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM
from nrl_models.cli import app
from nrl_models.consistency.cells import Cell
from nrl_models.consistency.consistency_report import CellResult, ConsistencyReport
from nrl_models.consistency.matrix import run_matrix
from nrl_models.consistency.measure import Comparison, Measurement, Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import ConsistencyError
from nrl_models.logprobs import Sampling
from nrl_models.logprobs.metrics import shown_error

CELL = Cell(100, "dummy", "greedy", 1)

TIGHT = replace(SETTINGS, threshold=1.0005, new_tokens=12)
"""A threshold that bf16 exceeds."""

Run = Callable[..., ConsistencyReport]


def result(error: float, noise: float, **options: Any) -> CellResult:
    """Create a result with this `token_mult_prob_error` in prefill, no error in decoding, and this noise floor."""
    zero = torch.zeros(1, 50, dtype=torch.float64)
    measurement = Measurement(
        tokens=torch.zeros(1, 100, dtype=torch.int64),
        prompt_length=50,
        decode=zero,
        prefill=zero + torch.tensor(error).log(),
        trainer=zero,
        rounded=zero + torch.tensor(noise).log(),
        noise_dtype=torch.bfloat16,
    )
    return CellResult(CELL, (measurement,), Sampling(0.0), 1.05, **options)


@pytest.mark.parametrize(
    ("error", "noise", "passes", "has_note"),
    [
        (1.04, 1.00001, True, False),
        (1.06, 1.00001, False, False),
        (1.073, 1.07, True, True),
        (1.104, 1.07, True, True),
        (1.107, 1.07, False, False),
        (1.06, float("nan"), False, False),
        (1.06, float("inf"), False, False),
    ],
)
def test_noise_floor_only_raises_bound(error: float, noise: float, passes: bool, has_note: bool) -> None:
    cell_result = result(error, noise)
    assert cell_result.passed == passes
    assert bool(cell_result.notes) == has_note
    if has_note:
        assert (
            f"above 1.05, is within the noise floor of bfloat16: {shown_error(cell_result.noise)}"
            in cell_result.notes[0]
        )


def test_problem_shows_error_with_enough_digits() -> None:
    (problem,) = replace(result(1.000104, 1.0), threshold=1.0001, noise_factor=0.0).problems
    error, threshold = re.fullmatch(r"token_mult_prob_error (.*) against prefill, above (.*)", problem).groups()
    assert float(error) == pytest.approx(1.000104, abs=1e-7)
    assert threshold == "1.0001"
    assert [shown_error(value) for value in (1.0, 1.0000006, 1.05, 2374.9429)] == ["1", "1.0000006", "1.05", "2374.94"]


@pytest.mark.parametrize("side", ["trainer", "decode", "prefill"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), Sampling(0.8, top_p=0.95), Sampling(top_k=9)], ids=str)
def test_zero_probability_tokens(sampling: Sampling, side: str) -> None:
    """Top-k and top-p may exclude one of 200 sampled tokens, but not where it was sampled."""
    values = torch.zeros(1, 200, dtype=torch.float64)
    others = dict.fromkeys(("decode", "prefill", "trainer", "rounded"), values)
    others[side] = values.index_fill(1, torch.tensor([7]), -math.inf)
    tokens = torch.zeros(1, 210, dtype=torch.int64)
    cell_result = CellResult(CELL, (Measurement(tokens=tokens, prompt_length=10, **others),), sampling, 1.05)
    assert cell_result.passed == (side != "decode" and sampling.truncates), cell_result.problems
    if side == "trainer" and not cell_result.passed:
        expected = "tokens of decode have probability 0 in the trainer, without top-k and top-p"
        assert cell_result.problems[0] == f"1 {expected}"


def test_zero_noise_factor_disables_noise_floor() -> None:
    assert not result(1.073, 1.07, noise_factor=0.0).passed
    with pytest.raises(ConsistencyError, match="noise_factor -1"):
        replace(SETTINGS, noise_factor=-1.0)


def test_worst_error_is_the_failing_one() -> None:
    assert result(1.5, 1.0).worst == (Comparison.PREFILL, pytest.approx(1.5))


@pytest.fixture
def run(checkpoint: Path, prompts: Prompts, tmp_path: Path) -> Run:
    """Return a function that runs the matrix with these dtypes of engine and trainer. `change` modifies the engine."""

    def run(
        engine_dtype: torch.dtype, dtype: torch.dtype, change: Callable[[Any], None] = lambda model: None
    ) -> ConsistencyReport:
        engine = HFEngine.start(checkpoint, dtype=engine_dtype)
        with torch.no_grad():
            change(engine.model)
        trainer = HFEngine(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype), "trainer")
        references = References(checkpoint)
        meter = Meter(engine, trainer, prompts, TIGHT, Store(tmp_path / "store", {}, fresh=True), references)
        return run_matrix(str(checkpoint), meter, references)

    return run


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_noise_floor_uses_lower_precision(run: Run, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    report = run(*dtypes)
    (cell_result,) = report.results
    assert cell_result.worst[1] > TIGHT.threshold
    assert cell_result.noise > 1.0005
    assert report.passed, report.markdown()
    assert "within the noise floor of bfloat16" in report.markdown()
    assert report.to_json()["cells"][0]["noise_dtype"] == "bfloat16"


def scaled_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight.mul_(1.1)


def swapped_gate_and_up(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    gate = mlp.gate_proj.weight.clone()
    mlp.gate_proj.weight.copy_(mlp.up_proj.weight)
    mlp.up_proj.weight.copy_(gate)


def wrong_rope_base(model: Any) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.mul_(10.0 ** -torch.linspace(0, 1, len(frequencies)))


@pytest.mark.long
@pytest.mark.parametrize("change", [scaled_norm, swapped_gate_and_up, wrong_rope_base])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_defect_fails_in_bfloat16(run: Run, dtype: torch.dtype, change: Callable[[Any], None]) -> None:
    report = run(torch.bfloat16, dtype, change)
    assert not report.passed
    assert "what the noise floor of 1.0" in report.results[0].problems[0]


@pytest.mark.long
def test_command_noise_factor(checkpoint: Path, tmp_path: Path) -> None:
    base = ["consistency", str(checkpoint), "--engine", "hf-generate", "--dtype", "bfloat16"]
    base += [
        "--trainer-dtype",
        "float32",
        "--threshold",
        "1.0005",
        "--new-tokens",
        "12",
        "--out",
        str(tmp_path / "out"),
    ]
    base += ["--length", "24", "--data", "dummy", "--batch", "2", "--json", str(tmp_path / "a.json")]
    passed = CliRunner().invoke(app, base)
    assert passed.exit_code == 0, passed.output
    assert "is within the noise floor of bfloat16" in " ".join(passed.output.split())
    assert json.loads((tmp_path / "a.json").read_text())["verdict"] == "pass"
    failed = CliRunner().invoke(app, [*base, "--noise-factor", "0"])
    assert failed.exit_code == 1
    assert "The difference is explained by precision" in " ".join(failed.output.split())
