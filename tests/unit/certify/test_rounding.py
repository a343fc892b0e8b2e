"""Errors above the bound that rounding explains decide nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nrl_models.certify import CheckResult, Status, with_engine
from nrl_models.certify.certified import CheckpointUnderTest, Options
from nrl_models.certify.check_result import Side
from nrl_models.consistency.cells import THRESHOLD, Cell
from nrl_models.consistency.consistency_report import CellResult
from nrl_models.consistency.measure import Measurement
from nrl_models.consistency.refit import RefitStep
from nrl_models.consistency.verdict import Party, Verdict
from nrl_models.engines.engine_types import RefitReport
from nrl_models.logprobs import Sampling
from nrl_models.quirks import VerdictKind

ROUNDING = Verdict(VerdictKind.ROUNDING, (), {}, note="Engine: bfloat16; trainer: bfloat16")
WRONG = Verdict(VerdictKind.ENGINE, (Party.DECODE, Party.PREFILL), {})


def cell(error: float, verdict: Verdict | None = None, length: int = 100, **values: Any) -> CellResult:
    """Return a cell whose decoding has this `token_mult_prob_error` against the trainer and the engine's prefill."""
    zero = torch.zeros(1, 50, dtype=torch.float64)
    arrays = {"decode": zero + math.log(error), "prefill": zero, "trainer": zero, "rounded": zero} | values
    measurement = Measurement(
        tokens=torch.zeros(1, length, dtype=torch.int64),
        prompt_length=50,
        noise_dtype=torch.bfloat16,
        **{name: tensor.clone() for name, tensor in arrays.items()},
    )
    return CellResult(Cell(length, "dummy", "greedy", 1), (measurement,), Sampling(0.0), THRESHOLD, verdict=verdict)


@pytest.fixture
def subject(tmp_path: Path) -> CheckpointUnderTest:
    subject = CheckpointUnderTest(tmp_path, Options("hf-generate", dtype=torch.bfloat16), tmp_path)
    subject.__dict__["folder"] = tmp_path  # there is no checkpoint
    return subject


def results(
    subject: CheckpointUnderTest, patch: pytest.MonkeyPatch, *cells: CellResult, error: str = ""
) -> Mapping[str, CheckResult]:
    """Return the results of checks on these cells, by name."""
    report = SimpleNamespace(results=list(cells), error=error, settings=SimpleNamespace(cells=lambda: list(cells)))
    patch.setattr(with_engine, "_matrix", lambda subject: report)
    return {result.name: result for result in with_engine.log_probabilities(subject)}


def test_rounding_decides_nothing(subject: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(subject, monkeypatch, cell(1.001), cell(1.12, ROUNDING))
    for name in ("log-probabilities", "decode against prefill"):
        assert found[name].status is Status.NOT_DECIDED
        assert (found[name].side, found[name].bound) == (None, THRESHOLD)
        assert found[name].value == pytest.approx(1.12)
        assert found[name].advice.endswith("Repeat with --dtype float32.")
    assert "above the bound with the verdict rounding: 1" in found["log-probabilities"].summary
    assert "explained by rounding" in found["log-probabilities"].advice


def test_fault_in_another_cell_fails(subject: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(subject, monkeypatch, cell(1.12, ROUNDING), cell(1.3, WRONG, length=200))["log-probabilities"]
    assert (found.status, found.side) == (Status.FAILED, Side.ENGINE)
    assert found.summary.startswith("length 200")
    assert found.advice.startswith("Wrong: engine decode and engine prefill")


@pytest.mark.parametrize("verdict", [None, WRONG, replace(ROUNDING, kind=VerdictKind.PRECISION)], ids=str)
def test_other_verdicts_fail(
    verdict: Verdict | None, subject: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(subject, monkeypatch, cell(1.12, verdict))
    assert found["log-probabilities"].status is found["decode against prefill"].status is Status.FAILED


def test_nan_fails_despite_rounding(subject: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = torch.zeros(1, 50, dtype=torch.float64).index_fill(1, torch.tensor([7]), -math.inf)
    found = results(subject, monkeypatch, cell(1.12, ROUNDING, trainer=trainer))["log-probabilities"]
    assert found.status is Status.FAILED
    assert "probability 0 in the trainer" in found.summary


REPORT = RefitReport(tensors=1, nbytes=1, buckets=1, largest_bucket=1, seconds=0.1, digests={"a": "0"})

REFIT = RefitStep("first", REPORT, (), cell(1.12, ROUNDING), 2.0)


@pytest.mark.parametrize(
    ("step", "status"),
    [
        (REFIT, Status.NOT_DECIDED),
        (replace(REFIT, is_narrowed=True), Status.FAILED),  # the first refit had the same rounding, and a smaller error
        (replace(REFIT, result=replace(cell(1.04, ROUNDING), threshold=1.01)), Status.FAILED),
        (replace(REFIT, problems=("a tensor did not arrive",)), Status.FAILED),
    ],
    ids=["first", "narrowed", "small", "incomplete"],
)
def test_rounding_after_refit(
    step: RefitStep, status: Status, subject: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_engine, "check_refit", lambda *args, **options: SimpleNamespace(steps=[step]))
    monkeypatch.setattr(with_engine, "refit_settings", lambda *args: None)
    first, *others = with_engine.refits(subject)
    assert first.status is status
    assert [result.status for result in others] == [Status.NOT_DECIDED]


def test_prefill_may_exclude_few_tokens_at_top_p(subject: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding decides whether a token at the limit is kept, also in the engine's prefill."""
    zero = torch.zeros(2, 200, dtype=torch.float64)
    excluded = zero.index_fill(1, torch.tensor([7]), -math.inf)
    usual = replace(
        cell(1.0, decode=zero, prefill=excluded, trainer=zero, rounded=zero), sampling=Sampling(0.8, top_p=0.95)
    )
    for result in (usual, replace(usual, sampling=Sampling(0.8))):
        found = results(subject, monkeypatch, result)
        expected = Status.PASSED if result is usual else Status.FAILED
        assert found["log-probabilities"].status is found["decode against prefill"].status is expected


def test_noise_between_decode_and_prefill_decides_nothing(
    subject: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise floor allows more than the guide's bound, also between the engine's own decode and prefill."""
    rounded = torch.full((1, 50), math.log(1.1), dtype=torch.float64)
    found = results(subject, monkeypatch, cell(1.08, rounded=rounded))
    assert {result.status for result in found.values()} == {Status.NOT_DECIDED}
    assert "agree only within the noise floor of bfloat16" in found["log-probabilities"].summary
