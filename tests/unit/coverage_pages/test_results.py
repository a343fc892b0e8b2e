"""Recorded outcomes: one file per family. A run replaces only the outcome of the same kind and architecture."""

import json
from pathlib import Path

import pytest
from versions import needs

from nrl_models import registry
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
from tools.variants import with_variants

OLD, NEW = {"torch": "1", "transformers": "5.0"}, {"torch": "2", "transformers": "5.0"}


def files(pages: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (pages / FOLDER).iterdir()}


def test_write_record_replaces_one_outcome(tmp_path: Path) -> None:
    names = ["LlamaForCausalLM", "LlamaForTokenClassification", "Qwen2ForCausalLM"]
    for name in names:
        for kind in (Kind.TP, Kind.FSDP):
            write_record(tmp_path, kind, name, Record(OLD, {"status": "agrees"}))
    before = files(tmp_path)
    write_record(tmp_path, Kind.TP, "LlamaForCausalLM", Record(NEW, {"status": "error"}))
    after = files(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"llama.json"}
    records = read_records(tmp_path)
    assert records[Kind.TP]["LlamaForCausalLM"] == Record(NEW, {"status": "error"})
    others = [records[kind][name] for kind in (Kind.TP, Kind.FSDP) for name in names]
    assert others.count(Record(OLD, {"status": "agrees"})) == 5
    assert not records[Kind.MUTANTS]


def test_alias_is_recorded_with_family_and_unknown_raises(tmp_path: Path) -> None:
    write_record(tmp_path, Kind.ENGINE, "KimiK25ForConditionalGeneration", Record(OLD, {"status": "agrees"}))
    (file,) = files(tmp_path)
    assert file.startswith("kimi")
    with pytest.raises(CoverageError, match="LamaForCausalLM belongs to no family"):
        write_record(tmp_path, Kind.ENGINE, "LamaForCausalLM", Record(OLD, {}))


def test_invalid_record_files_raise(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    file = tmp_path / FOLDER / "llama.json"
    for text, message in (("<<<<<<< HEAD", "does not hold"), ('{"LlamaForCausalLM": {"speed": {}}}', "speed")):
        file.write_text(text)
        with pytest.raises(CoverageError, match=message):
            read_records(tmp_path)


def test_versions_summary() -> None:
    records = {"a": Record(OLD, {}), "b": Record(NEW, {}), "c": Record(OLD, {})}
    assert versions_summary({"a": records["a"]}) == "torch 1, transformers 5.0"
    assert versions_summary(records, names=True) == "transformers 5.0, torch 1 (a, c) and torch 2 (b)"


def test_as_json_keeps_short_values_on_one_line() -> None:
    content = {"a": {"b": ["word"] * 40, "c": {"d": 1, "e": []}, "f": {}}}
    text = as_json(content)
    assert json.loads(text) == content
    assert '  "c": {"d": 1, "e": []},\n' in text
    assert max(map(len, text.splitlines())) <= WIDTH


@needs("Gemma4ForCausalLM")
def test_committed_records_match_registered_families() -> None:
    assert {path.stem for path in (PAGES / FOLDER).glob("*.json")} == set(registry.FAMILIES)
    registered = set(with_variants(registry.architectures()))
    for of_kind in read_records(PAGES).values():
        assert of_kind.keys() <= registered
