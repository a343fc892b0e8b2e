"""Tiny models of families that both the engine and the registry have agree, also after refits.

One family of each pattern runs here. `--every-family` runs all, as does `make engine-coverage`, which publishes the
outcomes. The published outcomes are expected. `LIMITS` explains the disagreements.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nrl_models import registry
from nrl_models.engines.hf import HFEngine
from nrl_models.logprobs import Sampling, token_mult_prob_error
from nrl_models.testing.tiny import TinyModelError
from tests.engine import certificates, families, sweep
from tests.engine.families import AGREES, NOT_DECIDED, compare_architecture, shared_architectures, tiny_model
from tests.engine.limits import LIMITS
from tests.engine.one_engine import OneEngine
from tests.engine.published import BF16, BOUND, OPTIONS, OVERRIDES
from tests.patterns import ONE_OF_EACH_PATTERN
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, read_records
from tools.variants import split_variant

PUBLISHED = read_records(PAGES)[Kind.ENGINE]
REPRESENTATIVE = {architecture for family in ONE_OF_EACH_PATTERN for architecture in registry.FAMILIES[family]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_family")
        metafunc.parametrize(
            "architecture",
            [name for name in shared_architectures() if every or split_variant(name)[0] in REPRESENTATIVE],
        )


def test_recorded_results_have_shared_architectures() -> None:
    assert len(shared_architectures()) > 100
    assert PUBLISHED.keys() <= set(shared_architectures())
    assert OVERRIDES.keys() | OPTIONS.keys() | BF16 | LIMITS.keys() <= set(shared_architectures())


def test_page_matches_recorded_results() -> None:
    for path, text in sweep.pages(PUBLISHED, shared_architectures()).items():
        assert path.read_text() == text


def test_engine_logprobs_match_trainer_after_refits(architecture: str, vllm: OneEngine, tmp_path: Path) -> None:
    outcome = compare_architecture(architecture, vllm, tmp_path)
    if architecture in LIMITS:
        limit = LIMITS[architecture]
        assert outcome.status == limit.status
        assert outcome.facts is not None
        assert limit.explains(outcome.facts), outcome.reason
        pytest.xfail(limit.reason)
    before = PUBLISHED[architecture].outcome["status"] if architecture in PUBLISHED else AGREES
    assert outcome.status == before, outcome.reason
    if outcome.status not in (AGREES, NOT_DECIDED):
        pytest.xfail(f"{outcome.status}: {outcome.reason}")
    assert outcome.refitted <= outcome.bounds[0]
    assert outcome.stepped <= outcome.bounds[1]
    assert architecture in BF16 or max(outcome.bounds) == BOUND


def test_tied_output_embedding_refit(vllm: OneEngine, tmp_path: Path) -> None:
    outcome = compare_architecture("LlamaForCausalLM", vllm, tmp_path, {"tie_word_embeddings": True})
    assert outcome.status == AGREES, outcome.reason


def test_weights_on_meta_are_not_compared(vllm: OneEngine, tmp_path: Path) -> None:
    """An engine that takes only text leaves a parameter of the vision part on meta."""
    outcome = compare_architecture("LlavaNextForConditionalGeneration", vllm, tmp_path)
    assert outcome.status == AGREES, outcome.reason


def test_sweep_records_an_architecture_without_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise TinyModelError("there is none")

    monkeypatch.setattr(families, "tiny_model", fail)
    monkeypatch.setattr(certificates, "write_certificate", lambda *arguments: None)
    sweep.run_here(["LlamaForCausalLM"], tmp_path / "outcomes")
    (outcome,) = sweep.outcomes(tmp_path / "outcomes").values()
    assert (outcome["status"], outcome["stage"]) == ("not run", "tiny model")


def test_gpt_oss_loaded_from_files_matches_trainer(vllm: OneEngine, tmp_path: Path) -> None:
    model = tiny_model("GptOssForCausalLM")
    model.save_pretrained(tmp_path)
    tokens = torch.randint(16, 200, (3, 40), generator=torch.Generator().manual_seed(0))
    scores = [
        torch.tensor(engine.score(tokens.tolist(), Sampling()))[:, 1:]
        for engine in (HFEngine(model, "trainer"), vllm(tmp_path))
    ]
    assert token_mult_prob_error(*scores) <= BOUND


def test_reason_omits_temporary_directory(vllm: OneEngine, tmp_path: Path) -> None:
    outcome = compare_architecture("DeepseekV32ForCausalLM", vllm, tmp_path)
    assert (outcome.status, outcome.stage) == ("not run", "start")
    assert outcome.reason.startswith("vLLM does not start on checkpoint: NotImplementedError")
    assert not [name for name, record in PUBLISHED.items() if "/tmp/" in record.outcome["reason"]]


@pytest.mark.parametrize(("name", "off"), [("LlamaForCausalLM", 0.01), ("Qwen3_5ForCausalLM", 0.5)])
def test_shifted_trainer_scores_disagree(
    name: str, off: float, vllm: OneEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = HFEngine.score

    def shifted(self: HFEngine, *args: object, **options: object) -> list[list[float]]:
        return [[value - off * (self.name == "trainer") for value in row] for row in score(self, *args, **options)]

    monkeypatch.setattr(HFEngine, "score", shifted)
    outcome = compare_architecture(name, vllm, tmp_path)
    assert outcome.status == "disagrees"
    assert "Wrong: trainer" in outcome.reason
    assert (max(outcome.bounds) > BOUND) == (name in BF16)
