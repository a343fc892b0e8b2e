"""`certify` finds planted faults, names their source, and rejects no healthy model. See `campaign.py`."""

from __future__ import annotations

import pytest

from tests.certify.campaign import FAULTS, HAS_VLLM, HEALTHY, VLLM_FAULTS, run_one
from tests.certify.model_faults import MODEL_FAULTS

OTHER_SIDES: dict[str, str] = {}
"""Faults for which another side is named."""

pytestmark = pytest.mark.long


def test_the_campaign_is_large_enough() -> None:
    assert len(FAULTS) >= 60
    assert len(set(HEALTHY)) == 30
    assert len(OTHER_SIDES) <= 0.05 * len(FAULTS)
    assert len(MODEL_FAULTS) >= 30


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_not_ready(name: str) -> None:
    found = run_one(name)
    assert found.answer == "not ready", found
    assert found.side == OTHER_SIDES.get(name, found.kind), found


@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM: make engine")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VLLM_FAULTS)
def test_faults_of_vllm_are_not_ready(name: str) -> None:
    found = run_one(name)
    assert found.answer == "not ready", found
    assert found.side == found.kind, found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", HEALTHY)
def test_healthy_models_are_not_rejected(architecture: str) -> None:
    found = run_one(architecture)
    assert found.answer in ("ready", "not decided"), found
