"""Reprs of public objects are one short line with the class and its size or outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM, BackendConfig, Sample, Sampling, check_consistency, check_parity
from nrl_models.certify import Answer, Certificate
from nrl_models.consistency import Data
from nrl_models.consistency.cells import Settings
from nrl_models.engines import RefitReport
from nrl_models.engines.hf import HFEngine


def adapter(checkpoint: Path) -> object:
    return AutoModelForCausalLM.from_pretrained(checkpoint).state_dict_adapter


def engine(checkpoint: Path) -> object:
    return HFEngine.start(checkpoint)


def parity(checkpoint: Path) -> object:
    return check_parity(checkpoint, checks=["1"])


def consistency(checkpoint: Path) -> Any:
    settings = Settings(lengths=(16,), data=(Data.DUMMY,), batches=(2,), new_tokens=4)
    return check_consistency(checkpoint, engine="hf-generate", settings=settings, dtype=torch.float32)


def cell(checkpoint: Path) -> object:
    return consistency(checkpoint).results[0]


def certificate(checkpoint: Path) -> object:
    shares: dict[str, Any] = {"files": {"a": "0" * 64}, "options": {}, "versions": {}, "hardware": {}}
    return Certificate.of(name="llama", answer=Answer.READY, results=(), not_covered=(), **shares)


def sample(checkpoint: Path) -> object:
    return Sample((1,) * 500, (2,) * 300, (0.5,) * 300)


def refit(checkpoint: Path) -> object:
    return RefitReport(2, 8, 0.5, 1, 8, digests={f"layer.{i}": "0" * 64 for i in range(99)})


@pytest.mark.parametrize(
    ("make", "starts"),
    [
        (adapter, "StateDictAdapter(35 parameters, 35 checkpoint tensors)"),
        (engine, "HFEngine('hf-generate', version=0)"),
        (parity, "<ParityReport PASS: 4 of 4 checks passed: "),
        (consistency, "<ConsistencyReport PASS: 2 of 2 cells passed: "),
        (cell, "<CellResult length 16"),
        (certificate, "<Certificate llama: ready, "),
        (sample, "Sample(500 prompt tokens, 300 tokens, 'length')"),
        (refit, "RefitReport(tensors=2, nbytes=8, "),
        (lambda _: BackendConfig(), "BackendConfig(attn=None, "),
        (lambda _: Sampling(), "Sampling(temperature=1.0, "),
    ],
)
def test_repr(
    make: Callable[[Path], object],
    starts: str,
    llama: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    llama.save_pretrained("m")
    shown = repr(make(Path("m")))
    assert shown.startswith(starts)
    assert len(shown) < 250
    assert "\n" not in shown


@pytest.mark.parametrize("combine", [True, False])
def test_printed_model_names_its_fused_projections(combine: bool, llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    shown = str(AutoModelForCausalLM.from_pretrained(tmp_path, combine=combine)).splitlines()
    layers = llama.config.num_hidden_layers
    expected = f"  fused projections: {layers} x q_proj + k_proj + v_proj, {layers} x gate_proj + up_proj"
    assert (shown[1] == expected) == combine
    assert ("fused" in "".join(shown)) == combine
