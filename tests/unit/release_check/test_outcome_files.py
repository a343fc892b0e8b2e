"""Outcomes are appended, and an interrupted write loses only its own line."""

from __future__ import annotations

from pathlib import Path

from tools.release_check.outcome_files import OutcomeFile, source_digest


def test_last_outcome_of_key_wins(tmp_path: Path) -> None:
    file = OutcomeFile(tmp_path / "new" / "outcomes.jsonl", ("name",))
    assert list(file) == []
    for value in (1, 2):
        file.add({"name": "a", "value": value})
    file.add({"name": "b", "value": 3})
    assert list(file) == [{"name": "a", "value": 2}, {"name": "b", "value": 3}]


def test_truncated_line_is_dropped(tmp_path: Path) -> None:
    file = OutcomeFile(tmp_path / "outcomes.jsonl", ("name",))
    file.add({"name": "a"})
    file.path.write_text(file.path.read_text() + '{"name": "b", "val')
    file.add({"name": "c"})
    assert [outcome["name"] for outcome in file] == ["a", "c"]


def test_digest_changes_with_sources(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "module.py").write_text("x = 1\n")
    before = source_digest(folder)
    assert source_digest(folder) == before
    (folder / "module.py").write_text("x = 2\n")
    assert source_digest(folder) != before
