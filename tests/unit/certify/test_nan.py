"""Checks with NaN in one of several measurements fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl_models.certify import CheckResult, Side, Status, in_loop, running_engine, without_engine
from nrl_models.certify.certified import CheckpointUnderTest, Options
from nrl_models.consistency.vision.image_check import ImageComparison
from nrl_models.parity.parity_report import ParityRow, Unit

ORDERS = [(0, 1), (1, 0)]


def ordered(order: tuple[int, int], *values: Any) -> list[Any]:
    return [values[index] for index in order]


@pytest.mark.parametrize("order", ORDERS)
def test_nan_in_padding_or_packing_fails(order: tuple[int, int]) -> None:
    actual = ordered(order, torch.zeros(3), torch.tensor([0.0, math.nan, 0.0]))
    result = without_engine._difference("padding", [torch.zeros(3)] * 2, actual, 1e-4)
    assert (result.status, result.side) == (Status.FAILED, Side.MODEL)


@pytest.mark.parametrize("order", ORDERS)
def test_nan_at_learning_rate_0_fails(order: tuple[int, int]) -> None:
    loop_controls = in_loop.Controls(tokens=8, ratio=ordered(order, 0.0, math.nan), changed=[[], []], sent=[2, 2])
    assert in_loop._at_zero(loop_controls, 1e-4, "").status is Status.FAILED


@pytest.mark.parametrize("order", ORDERS)
def test_nan_in_image_check_fails(order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = CheckpointUnderTest(tmp_path, Options("hf-generate"), tmp_path)
    engine = type("Engine", (), {"name": "vllm", "capabilities": lambda self: type("", (), {"raw_images": True})})()
    vars(subject).update(engine=engine, trainer=type("Trainer", (), {"model": None})())
    monkeypatch.setattr(running_engine, "takes_images", lambda model: True)
    monkeypatch.setattr(running_engine, "is_base_model", lambda model: False)
    errors = ordered(order, 1.0, math.nan)
    monkeypatch.setattr(running_engine, "_raw_images", lambda subject: (errors, 8, 1.05, []))
    (result,) = running_engine.images(subject)
    assert (result.status, result.side) == (Status.FAILED, Side.ENGINE)


@pytest.mark.parametrize("order", ORDERS)
def test_nan_in_image_comparison_fails(order: tuple[int, int]) -> None:
    decode, prefill = ordered(order, 1.0, math.nan)
    assert not ImageComparison(((8, 8),), 9, 8, decode, prefill, 1.05).passed


@pytest.mark.parametrize("order", ORDERS)
def test_nan_is_worst_parity_row(order: tuple[int, int]) -> None:
    rows = [
        ParityRow(f"row {value}", True, "", "", value=value, bound=1.0, unit=Unit.MAX_DIFF)
        for value in ordered(order, 0.5, math.nan)
    ]
    result: CheckResult = without_engine._level("logits", rows, [])
    assert math.isnan(result.value or 0.0)
