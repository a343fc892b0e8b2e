"""Recording ledgers: what is recorded is not found out again, and nothing is mixed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nrl_models import registry
from nrl_models.cli import app
from nrl_models.common.config.ledger import DEFAULT_ONLY, INERT, UNTRIED, Ledger, Ledgers, read_ledgers, recorded
from nrl_models.devtools import record_ledger
from nrl_models.devtools.record_ledger import LedgerError, write_ledger
from nrl_models.errors import UnknownArchitectureError

LEDGER = Ledger(
    {"hidden_size": "shapes", "vision_config.hidden_size": "shapes", "eos_token_id": INERT, "mlp_bias": DEFAULT_ONLY},
    {"mlp_bias": False},
    {"hidden_size": "outputs: .logits differs"},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = Ledgers("5.0", {"NovaForCausalLM": LEDGER, "MoonForCausalLM": Ledger({"a": "outputs", "b": UNTRIED})})
    written.write(tmp_path / "ledger.json")
    assert read_ledgers(tmp_path / "ledger.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]
    assert LEDGER.count("consumed") == 2
    assert LEDGER.count(INERT) == LEDGER.count(DEFAULT_ONLY) == 1
    assert read_ledgers(tmp_path / "none.json") == Ledgers("", {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """For which architectures ledgers are found out, and whether by a survey; at no cost."""
    found: list[tuple[str, bool]] = []

    def find(case: Any, *, survey: bool = False) -> Ledger:
        found.append((case.architecture, survey))
        return Ledger({"a": UNTRIED if survey else "outputs"})

    monkeypatch.setattr(record_ledger, "ledger_of", find)
    return found


def test_only_what_is_missing_is_found_out(tmp_path: Path, asked: list[tuple[str, bool]]) -> None:
    file, names = tmp_path / "ledger.json", ["LlamaForCausalLM", "MistralForCausalLM"]
    list(write_ledger(names[:1], survey=True, file=file))
    list(write_ledger(names[:1], survey=True, file=file))
    assert asked == [(names[0], True)]
    list(write_ledger(names, file=file))  # what was only surveyed is found out, too
    list(write_ledger(names, file=file))
    assert asked[1:] == [(names[0], False), (names[1], False)]
    list(write_ledger(names[1:], again=True, file=file))
    assert asked[3:] == [(names[1], False)]
    assert {name: one.kinds for name, one in read_ledgers(file).of.items()} == {
        name: {"a": "outputs"} for name in names
    }


def test_ledgers_of_two_versions_do_not_mix(tmp_path: Path, asked: list[tuple[str, bool]]) -> None:
    file = tmp_path / "ledger.json"
    Ledgers("4.0", {"LlamaForCausalLM": LEDGER}).write(file)
    before = file.read_text()
    with pytest.raises(LedgerError, match=r"is of transformers 4\.0"):
        list(write_ledger(["MistralForCausalLM"], file=file))
    with pytest.raises(UnknownArchitectureError, match="LlamaForCausalLLM"):
        list(write_ledger(["LlamaForCausalLLM"], file=file))
    assert not asked
    assert file.read_text() == before


def test_the_command_fails_where_the_two_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(names: Any, *, again: bool, survey: bool) -> Iterator[tuple[str, Ledger]]:
        assert (list(names), again, survey) == (["NovaForCausalLM"], True, False)
        yield "NovaForCausalLM", LEDGER

    monkeypatch.setattr(record_ledger, "write_ledger", write)
    result = CliRunner().invoke(app, ["dev", "ledger", "NovaForCausalLM", "--again"])
    assert result.exit_code == 1
    assert "NovaForCausalLM: 2 consumed, 1 inert, 1 default only" in result.output
    assert "hidden_size acts otherwise than in transformers: outputs: .logits differs" in result.output


def test_the_file_is_shipped_and_orderly() -> None:
    content = json.loads(record_ledger.FILE.read_text())
    assert list(content["ledgers"]) == sorted(content["ledgers"])
    assert recorded().transformers == content["transformers"]


def test_every_key_of_every_architecture_was_tried() -> None:
    registered = registry.architectures(aliases=False)
    ledgers = {name: recorded().of.get(name) for name in registered if not registry.unmet_requirement(name)}
    untried = [name for name, one in ledgers.items() if one is None or one.count(UNTRIED)]
    assert not untried, "run `nrl-models dev ledger` and commit nrl_models/families/ledger.json"
