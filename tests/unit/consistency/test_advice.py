"""The verdict advises transformers' classes in vLLM if they were measured to be correct in this case."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model
from small_cell import SETTINGS
from transformers import LlamaConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.consistency import references
from nrl_models.consistency.matrix import _witness_options, run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.consistency.verdict import Advice, Opinion, Verdict, Vote
from nrl_models.engines.engine_types import Capabilities, Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.quirks import VerdictKind
from nrl_models.testing.tiny import tiny_config


class EngineWithBackend(HFEngine):
    """An engine that can also run transformers' classes, as vLLM. `nan`: its scores are NaN."""

    nan = False

    def _score(self, *args: Any, **options: Any) -> list[list[float]]:
        return [[math.nan if self.nan else value for value in row] for row in super()._score(*args, **options)]

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), transformers_classes=True)


class Backend(HFEngine):
    """An engine that runs transformers' classes, as vLLM. `off`: error of decoded log-probabilities, in nats."""

    off = 0.0

    def _generate(self, *args: Any, **options: Any) -> list[Sample]:
        samples = super()._generate(*args, **options)
        return [replace(sample, logprobs=tuple(value - self.off for value in sample.logprobs)) for sample in samples]


@dataclass(frozen=True)
class Case:
    """The settings of a test: the side that is wrong, and the witness, which is correct by default."""

    witness: str = "vllm-transformers"
    witness_config: dict[str, Any] = field(default_factory=dict)
    decodes_off: float = 0.0
    own_classes: bool = True
    random_weights: bool = False
    wrong: str = "engine"
    nan: bool = False
    """Whether the engine's scores are NaN, in addition to wrong log-probabilities when it samples."""


@pytest.fixture
def advised(tmp_path: Path, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Verdict]:
    """Return a function that runs a case and returns its verdict, checked to survive serialization."""
    new_model(tiny_config(LlamaConfig)).save_pretrained(tmp_path / "checkpoint")

    def advised(case: Case) -> Verdict:
        path = tmp_path / "checkpoint"

        def start(name: str, path: Path, dtype: torch.dtype) -> HFEngine:
            engine = Backend(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **case.witness_config), name)
            engine.off = case.decodes_off
            return engine

        monkeypatch.setattr(references, "start_engine", start)
        ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
        with torch.no_grad():
            wrong = theirs if case.wrong == "engine" else ours
            wrong.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        engine = (EngineWithBackend if case.own_classes else HFEngine)(theirs, "engine")
        engine.nan = case.nan
        store = Store(tmp_path / "store", {})
        meter = Meter(engine, HFEngine(ours, "trainer"), prompts, replace(SETTINGS, threshold=1.00001), store)
        case_references = References(path, witness=case.witness)
        verdict = run_matrix(str(path), meter, case_references, random_weights=case.random_weights).results[0].verdict
        assert verdict is not None
        restored = Verdict.from_json(json.loads(json.dumps(verdict.to_json())))
        assert (restored.witness, restored.advice) == (verdict.witness, verdict.advice)
        return verdict

    return advised


@pytest.mark.parametrize("nan", [False, True])
def test_correct_transformers_backend_is_advised(advised: Callable[[Case], Verdict], nan: bool) -> None:
    assert advised(Case(witness="", nan=nan)).advice is None
    verdict = advised(Case(nan=nan))  # the previous result is stored, without a witness
    assert verdict.kind == (VerdictKind.NOT_FINITE if nan else VerdictKind.ENGINE)
    assert verdict.witness == Opinion("vllm-transformers", Vote.REFERENCE, decodes=True)
    assert verdict.advice is Advice.TRANSFORMERS_BACKEND
    assert 'Advice: serve it with model_impl="transformers"' in verdict.summary


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "vote", "decodes"),
    [
        (Case(witness="mlx"), Vote.REFERENCE, None),
        (Case(own_classes=False), Vote.REFERENCE, None),
        (Case(random_weights=True), Vote.REFERENCE, None),
        (Case(wrong="trainer"), Vote.REFERENCE, None),
        (Case(decodes_off=0.01), Vote.REFERENCE, False),
        (Case(witness_config={"rms_norm_eps": 0.1}), Vote.NEITHER, None),
    ],
    ids=["other-engine", "no-backend", "refitted", "wrong-trainer", "wrong-decoding", "wrong-witness"],
)
def test_no_advice_without_matching_measurement(
    advised: Callable[[Case], Verdict], case: Case, vote: Vote, decodes: bool | None
) -> None:
    verdict = advised(case)
    assert verdict.witness == Opinion(case.witness, vote, decodes=decodes)
    assert verdict.advice is None
    assert "Advice" not in verdict.summary
    assert ("but differs in decoding" in verdict.summary) == (decodes is False)


def test_witness_in_vllm_uses_engine_options() -> None:
    started = {"dtype": torch.bfloat16, "max_length": 25, "seed": 3, "load_format": "auto", "multiprocessing": False}
    same = {"dtype": torch.bfloat16, "max_length": 25, "gpu_memory_utilization": 0.4}
    assert _witness_options("vllm-transformers", SETTINGS, started | same) == same
    external = started | {"python": "another/environment"}
    assert _witness_options("vllm-transformers", SETTINGS, external) == {
        "max_length": 25
    }  # fp32, as for other witnesses
    assert _witness_options("mlx", SETTINGS, started) == {}
