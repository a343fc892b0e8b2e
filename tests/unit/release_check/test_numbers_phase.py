"""The phase `numbers` compares with the records of the tested version, and reports what it cannot compare."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.unit.release_check.wheels import sources
from tools.release_check import phases, subject
from tools.release_check.errors import PhaseError, SkippedPhaseError
from tools.release_check.findings import Finding, Kind, causes_of
from tools.release_check.numbers.facts import Kind as Fact
from tools.release_check.numbers.facts import Section, SectionRecord
from tools.release_check.packages.environments import Environment
from tools.release_check.phases import numbers
from tools.release_check.report import title
from tools.release_check.subject import Subject

MODULE = "transformers/models/one/modeling_one.py"
ABSENT: Any = {Fact.CLASS: {"present": False}}
BEFORE = {
    "One": {Fact.NUMBERS: {"logits": [1.0, 2.0]}},
    "Gone": {Fact.NUMBERS: {"logits": [1.0]}},
    "New": ABSENT,
    "Newer": ABSENT,
}
AFTER = {**BEFORE, "Gone": ABSENT, "New": BEFORE["One"], "Newer": BEFORE["One"]}
TESTED = {"transformers": Version("5.0"), "torch": Version("2.0")}
SECTIONS = (Section.EAGER, Section.VIDEO)


def records(of_class: dict[str, Any], sections: Sequence[Section] = SECTIONS) -> str:
    found = (SectionRecord(name, section, facts) for name, facts in of_class.items() for section in sections)
    return "".join(f"{json.dumps(record.to_json())}\n" for record in found)


@pytest.fixture(autouse=True)
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of transformers with a changed function, and records of the first."""
    files = [sources(tmp_path, version, {MODULE: f"def f(): return {version}\n"}) for version in ("5.0", "5.1")]
    by_version = dict(zip((Version("5.0"), Version("5.1")), files, strict=True))
    for module in (phases, subject):
        monkeypatch.setattr(module, "sources_of", lambda package, version, folder: by_version[version])
    monkeypatch.setattr(phases, "FOLDER", tmp_path)
    monkeypatch.setattr(phases, "recorded_names", lambda: list(BEFORE))
    monkeypatch.setattr(
        "tools.release_check.numbers.changes.UpstreamDifference._modules_of",
        lambda self, architecture: ["transformers.models.one.modeling_one"],
    )
    (tmp_path / "5.0.jsonl.gz").write_bytes(gzip.compress(records(BEFORE).encode()))


def findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str, versions: dict[str, str], names_only: str = ""
) -> list[Finding]:
    def run(subject: Subject, phase: Any, arguments: Any, **options: Any) -> int:
        subject.file(phase).write_text(recorded)
        return 0

    monkeypatch.setattr(Subject, "run", run)
    environment = Environment(tmp_path, tmp_path)
    judged = {name: Version(found) for name, found in versions.items()}
    return list(numbers(Subject(environment, judged, TESTED, frozenset(filter(None, [names_only])), tmp_path, 1)))


def test_new_and_removed_classes_are_one_cause_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(tmp_path, monkeypatch, records(AFTER), {"transformers": "5.1"})
    causes = {title(cause): cause for cause in causes_of(found)}
    assert {name: cause.architectures for name, cause in causes.items()} == {
        "transformers: new classes": ("New", "Newer"),
        "transformers: removed classes": ("Gone",),
    }
    assert not any(cause.functions for cause in causes.values())


def test_changed_numbers_name_changed_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = records({**BEFORE, "One": {Fact.NUMBERS: {"logits": [1.0, 3.0]}}})
    found = findings(tmp_path, monkeypatch, changed, {"transformers": "5.1"})
    assert {(one.kind, one.subject) for one in found} == {
        (Kind.CHANGED_NUMBERS, "transformers.models.one.modeling_one:f")
    }


def test_new_torch_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = records({**BEFORE, "One": {Fact.NUMBERS: {"logits": [1.0, 3.0]}}})
    found = findings(tmp_path, monkeypatch, changed, {"torch": "2.1"})
    assert {(one.kind, one.subject, one.functions) for one in found} == {(Kind.CHANGED_NUMBERS, "torch", ())}


@pytest.mark.parametrize(
    ("versions", "names_only"),
    [({"torch": "2.1"}, "torch"), ({"torch": "2.0", "peft": "0.22"}, ""), ({"transformers": "5.0"}, "")],
)
def test_recorded_versions_are_not_compared(
    versions: dict[str, str], names_only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SkippedPhaseError, match="versions of the recorded results"):
        findings(tmp_path, monkeypatch, records(AFTER), versions, names_only)


@pytest.mark.parametrize("recorded", [records(BEFORE, [Section.EAGER]), records(BEFORE, [*SECTIONS, Section.SDPA])])
def test_sections_without_comparison_are_an_error(
    recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "video" if "sdpa" not in recorded else "sdpa"
    with pytest.raises(PhaseError, match=rf"not compared.*: {missing} \(4 classes\)"):
        findings(tmp_path, monkeypatch, recorded, {"transformers": "5.1"})
