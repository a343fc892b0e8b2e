"""`certify` finds planted faults, names their source, and rejects no healthy model. See `campaign.py`."""

from __future__ import annotations

import pytest

from tests.certify.campaign import FAULTS, HAS_VLLM, HEALTHY, VLLM_FAULTS, run_one
from tests.certify.model_faults import MODEL_FAULTS

OTHER_SIDES: dict[str, str] = {}
"""Faults for which another side is named."""

pytestmark = pytest.mark.long


def test_campaign_size() -> None:
    assert len(FAULTS) >= 60
    assert len(set(HEALTHY)) == 30
    assert len(OTHER_SIDES) <= 0.05 * len(FAULTS)
    assert len(MODEL_FAULTS) >= 30


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_not_ready(name: str) -> None:
    outcome = run_one(name)
    assert outcome.answer == "not ready", outcome
    assert outcome.side == OTHER_SIDES.get(name, outcome.kind), outcome


@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM: make engine")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VLLM_FAULTS)
def test_vllm_faults_are_not_ready(name: str) -> None:
    outcome = run_one(name)
    assert outcome.answer == "not ready", outcome
    assert outcome.side == outcome.kind, outcome


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", HEALTHY)
def test_healthy_models_are_not_rejected(architecture: str) -> None:
    outcome = run_one(architecture)
    assert outcome.answer in ("ready", "not decided"), outcome
