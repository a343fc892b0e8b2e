"""Recorded outcomes: one file per family. A run replaces only the outcome of the same kind and architecture."""

import json
from pathlib import Path

import pytest
from versions import needs

from nrl_models import registry
from nrl_models.testing.variants import with_variants
from tools.checkout import PAGES
from tools.coverage_pages.errors import CoverageError
from tools.coverage_pages.results import (
    FOLDER,
    WIDTH,
    Kind,
    Record,
    as_json,
    read_records,
    versions_summary,
    write_record,
)

OLD, NEW = {"torch": "1", "transformers": "5.0"}, {"torch": "2", "transformers": "5.0"}


def files(pages: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (pages / FOLDER).iterdir()}


def test_an_outcome_replaces_its_own_and_nothing_else(tmp_path: Path) -> None:
    names = ["LlamaForCausalLM", "LlamaForTokenClassification", "Qwen2ForCausalLM"]
    for name in names:
        for kind in (Kind.TP, Kind.FSDP):
            write_record(tmp_path, kind, name, Record(OLD, {"status": "agrees"}))
    before = files(tmp_path)
    write_record(tmp_path, Kind.TP, "LlamaForCausalLM", Record(NEW, {"status": "error"}))
    after = files(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"llama.json"}
    found = read_records(tmp_path)
    assert found[Kind.TP]["LlamaForCausalLM"] == Record(NEW, {"status": "error"})
    others = [found[kind][name] for kind in (Kind.TP, Kind.FSDP) for name in names]
    assert others.count(Record(OLD, {"status": "agrees"})) == 5
    assert not found[Kind.MUTANTS]


def test_an_alias_is_recorded_with_its_family_and_what_no_family_serves_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, Kind.ENGINE, "KimiK25ForConditionalGeneration", Record(OLD, {"status": "agrees"}))
    (file,) = files(tmp_path)
    assert file.startswith("kimi")
    with pytest.raises(CoverageError, match="LamaForCausalLM belongs to no family"):
        write_record(tmp_path, Kind.ENGINE, "LamaForCausalLM", Record(OLD, {}))


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    file = tmp_path / FOLDER / "llama.json"
    for text, message in (("<<<<<<< HEAD", "does not hold"), ('{"LlamaForCausalLM": {"speed": {}}}', "speed")):
        file.write_text(text)
        with pytest.raises(CoverageError, match=message):
            read_records(tmp_path)


def test_versions_are_named_with_those_that_have_them() -> None:
    found = {"a": Record(OLD, {}), "b": Record(NEW, {}), "c": Record(OLD, {})}
    assert versions_summary({"a": found["a"]}) == "torch 1, transformers 5.0"
    assert versions_summary(found, names=True) == "transformers 5.0, torch 1 (a, c) and torch 2 (b)"


def test_json_has_short_values_in_a_line() -> None:
    content = {"a": {"b": ["word"] * 40, "c": {"d": 1, "e": []}, "f": {}}}
    text = as_json(content)
    assert json.loads(text) == content
    assert '  "c": {"d": 1, "e": []},\n' in text
    assert max(map(len, text.splitlines())) <= WIDTH


@needs("Gemma4ForCausalLM")
def test_the_committed_files_are_those_of_the_registered_families() -> None:
    assert {path.stem for path in (PAGES / FOLDER).glob("*.json")} == set(registry.FAMILIES)
    registered = set(with_variants(registry.architectures()))
    for of_kind in read_records(PAGES).values():
        assert of_kind.keys() <= registered
