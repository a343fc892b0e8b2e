"""Recorded ledgers are not tested again, and ledgers of different architectures are not mixed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nrl_models import registry
from nrl_models.common.config.recorded_keys import FILE
from nrl_models.errors import UnknownArchitectureError
from tools.ledger import record as record_ledger
from tools.ledger.__main__ import app
from tools.ledger.ledger import KeyKind, Ledger, read_ledgers, recorded
from tools.ledger.loading_table import loading_table
from tools.ledger.record import record, write_ledger

LEDGER = Ledger(
    {
        "hidden_size": KeyKind.SHAPES,
        "vision_config.hidden_size": KeyKind.SHAPES,
        "eos_token_id": KeyKind.INERT,
        "mlp_bias": KeyKind.DEFAULT_ONLY,
    },
    {"mlp_bias": False},
    {"hidden_size": "outputs: .logits differs"},
    transformers="4.0",
)


def test_ledger_round_trip(tmp_path: Path) -> None:
    other = Ledger({"a": KeyKind.OUTPUTS, "b": KeyKind.UNTRIED}, transformers="5.0")
    written = {"LlamaForCausalLM": LEDGER, "LlamaForTokenClassification": other, "Qwen2ForCausalLM": other}
    for name, ledger in written.items():
        record(name, ledger, tmp_path / "ledger")
    assert read_ledgers(tmp_path / "ledger") == written
    assert sorted(path.name for path in (tmp_path / "ledger").iterdir()) == ["llama.json", "qwen2.json"]
    assert LEDGER.consumed == 2
    assert LEDGER.count(KeyKind.INERT) == LEDGER.count(KeyKind.DEFAULT_ONLY) == 1
    assert read_ledgers(tmp_path / "none") == {}


@pytest.fixture
def ledger_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Record the tested architectures and whether only a survey ran, without running the test."""
    runs: list[tuple[str, bool]] = []

    def find(case: Any, *, survey: bool = False) -> Ledger:
        runs.append((case.architecture, survey))
        return Ledger({"a": KeyKind.UNTRIED if survey else KeyKind.OUTPUTS}, transformers=version("transformers"))

    monkeypatch.setattr(record_ledger, "ledger_of", find)
    return runs


def test_only_missing_ledgers_are_computed(tmp_path: Path, ledger_runs: list[tuple[str, bool]]) -> None:
    names = ["LlamaForCausalLM", "MistralForCausalLM"]
    list(write_ledger(names[:1], survey=True, folder=tmp_path))
    list(write_ledger(names[:1], survey=True, folder=tmp_path))
    assert ledger_runs == [(names[0], True)]
    list(write_ledger(names, folder=tmp_path))  # surveyed architectures are also tested
    list(write_ledger(names, folder=tmp_path))
    assert ledger_runs[1:] == [(names[0], False), (names[1], False)]
    list(write_ledger(names[1:], again=True, folder=tmp_path))
    assert ledger_runs[3:] == [(names[1], False)]
    assert {name: ledger.kinds for name, ledger in read_ledgers(tmp_path).items()} == {
        name: {"a": "outputs"} for name in names
    }


def test_ledgers_of_other_versions_are_kept_until_rerun(tmp_path: Path, ledger_runs: list[tuple[str, bool]]) -> None:
    record("LlamaForCausalLM", LEDGER, tmp_path)
    record("LlamaForTokenClassification", LEDGER, tmp_path)
    list(write_ledger(["LlamaForCausalLM", "MistralForCausalLM"], folder=tmp_path))
    assert [name for name, _ in ledger_runs] == ["LlamaForCausalLM", "MistralForCausalLM"]
    ledgers = read_ledgers(tmp_path)
    assert ledgers["LlamaForTokenClassification"] == LEDGER
    assert ledgers["LlamaForCausalLM"].transformers == version("transformers")


def test_unknown_architecture_raises(tmp_path: Path, ledger_runs: list[tuple[str, bool]]) -> None:
    with pytest.raises(UnknownArchitectureError, match=r"LlamaForCausalLLM \(did you mean LlamaForCausalLM\?\)"):
        list(write_ledger(["LlamaForCausalLLM"], folder=tmp_path))
    assert not ledger_runs
    assert not list(tmp_path.iterdir())


def test_command_fails_on_departures(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(names: Any, *, again: bool, survey: bool) -> Iterator[tuple[str, Ledger]]:
        assert (list(names), again, survey) == (["NovaForCausalLM"], True, False)
        yield "NovaForCausalLM", LEDGER

    monkeypatch.setattr(record_ledger, "write_ledger", write)
    result = CliRunner().invoke(app, ["NovaForCausalLM", "--again"])
    assert result.exit_code == 1
    assert "NovaForCausalLM: 2 consumed, 1 inert, 1 default only" in result.output
    assert "hidden_size behaves differently from transformers: outputs: .logits differs" in result.output


def test_ledger_files_match_registered_families() -> None:
    assert {path.stem for path in record_ledger.FOLDER.glob("*.json")} == set(registry.FAMILIES)
    assert recorded().keys() <= set(registry.architectures(aliases=False))


def test_no_key_is_untried() -> None:
    registered = registry.architectures(aliases=False)
    ledgers = {name: recorded().get(name) for name in registered if not registry.unmet_requirement(name)}
    untried = [name for name, ledger in ledgers.items() if ledger is None or ledger.count(KeyKind.UNTRIED)]
    assert not untried, "run `python -m tools.ledger` and commit tools/ledger/recorded"


def test_packaged_table_matches_ledger() -> None:
    table = json.loads(FILE.read_text())
    assert table == loading_table(recorded()), "run `python -m tools.ledger` and commit nrl_models/families"
    assert table["outputs"]["logit_scale"] == "CohereForCausalLM"
    assert table["supported"]
