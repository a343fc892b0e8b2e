"""Recording the outcomes of generated tests replaces only the records of the tested architectures."""

import json
from pathlib import Path
from typing import Any

import pytest
from families import test_families

from nrl_models import registry
from nrl_models.errors import UnknownArchitectureError
from nrl_models.testing.features import FEATURES, SUITE
from nrl_models.testing.features import generated_tests as proofs
from tools.checkout import PAGES
from tools.coverage_pages import generated_tests
from tools.coverage_pages.errors import CoverageError
from tools.coverage_pages.generated_tests import (
    GeneratedTests,
    read_generated_tests,
    record_generated_tests,
    run_generated_tests,
    verdict_of,
)
from tools.coverage_pages.overview import Verdict
from tools.coverage_pages.results import Kind, read_records

VERSIONS = {"nrl_models": "0.1.0", "torch": "9", "transformers": "9"}


def row(architecture: str, check: str, outcome: str = "passed", reason: str = "") -> dict[str, Any]:
    return {"architecture": architecture, "check": check, "outcome": outcome, "reason": reason}


def results(folder: Path, *rows: dict[str, Any], versions: dict[str, str] = VERSIONS) -> Path:
    file = folder / "results.json"
    file.write_text(json.dumps({"versions": versions, "results": rows}))
    return file


def test_run_replaces_only_its_own_outcomes(tmp_path: Path) -> None:
    first = [row("LlamaForCausalLM", "test_lora"), row("Qwen2ForCausalLM", "test_lora")]
    record_generated_tests(results(tmp_path, *first), tmp_path)
    second = [
        row("LlamaForCausalLM", "test_lora", "failed", "RuntimeError: no"),
        row("LlamaForCausalLM", "test_packing[None]", "limited", "documents see each other"),
        row("LlamaForCausalLM", "test_greedy_generation", "skipped", "Skipped: does not generate"),
        row("Qwen2ForCausalLM", "test_lora", "skipped", "Skipped: Qwen2ForCausalLM needs aeons"),
    ]
    newer = VERSIONS | {"torch": "10"}
    assert record_generated_tests(results(tmp_path, *second, versions=newer), tmp_path) == ["LlamaForCausalLM"]
    records = read_records(tmp_path)
    assert {name: record.versions["torch"] for name, record in records[Kind.TESTS].items()} == {
        "LlamaForCausalLM": "10",
        "Qwen2ForCausalLM": "9",
    }
    tests = read_generated_tests(records)
    assert tests["Qwen2ForCausalLM"].passed == 1
    assert tests["LlamaForCausalLM"] == GeneratedTests(
        "llama",
        ["dense"],
        0,
        {"limited": ["packed sequences"], "fails": ["LoRA"]},
        {"test_lora": "RuntimeError: no"},
        {"does not generate": 1},
    )
    verdicts = tests["LlamaForCausalLM"].verdicts()
    assert list(verdicts) == list(FEATURES)
    assert (verdicts["LoRA"], verdicts["packed sequences"], verdicts["generate"]) == ("fails", "limited", "n/a")


def test_invalid_results_file_raises(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="is not what pytest --nrl-results writes"):
        record_generated_tests(tmp_path / "absent.json", tmp_path)


def test_verdict_is_worst_outcome() -> None:
    rows = [
        row("", "test_packing[None]"),
        row("", "test_packing[ones]", "failed"),
        row("", "test_left_padding", "skipped"),
        row("", "test_layer_equivalence[float32]"),
        row("", "test_called_twice", "limited"),
        row("", "test_greedy_generation"),
    ]
    assert verdict_of(rows, "packed sequences") == Verdict.FAILS
    assert verdict_of(rows, "left padding") == Verdict.NOT_APPLICABLE
    assert verdict_of(rows, "layers") == Verdict.LIMITED
    assert verdict_of(rows, "generate") == Verdict.YES


def test_generated_tests_and_features_correspond() -> None:
    assert set(proofs()) == {name for name in vars(test_families) if name.startswith("test_")}
    assert set(proofs().values()) == set(FEATURES)


def test_every_architecture_passed_every_test() -> None:
    recorded = read_generated_tests(read_records(PAGES))
    assert recorded.keys() == {name for names in registry.FAMILIES.values() for name in names}
    assert not {name: tests.failed for name, tests in recorded.items() if tests.failed}


def test_only_named_architectures_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], *, check: bool) -> Done:
        commands.append(command)
        results(tmp_path)
        return Done()

    monkeypatch.setattr(generated_tests.subprocess, "run", run)
    run_generated_tests(["LlamaForCausalLM"], tmp_path / "results.json")
    run_generated_tests([], tmp_path / "results.json")
    assert commands[0][-1] == "--nrl-family=LlamaForCausalLM"
    assert commands[1][-1] == str(SUITE)
    Done.returncode = 3
    with pytest.raises(CoverageError, match="exit status 3"):
        run_generated_tests([], tmp_path / "results.json")


def test_misspelled_architecture_raises(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=r"LamaForCausalLM \(did you mean LlamaForCausalLM\?\)"):
        run_generated_tests(["LamaForCausalLM"], tmp_path / "results.json")
