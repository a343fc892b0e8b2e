"""The phrase check of `make lint` finds planted phrases in prose, and nothing in code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import phrases


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("page.md", "It runs in a process of its own.\n", ["page.md:1: 'in a process of its own': write"]),
        ("page.md", "```\ntoo, of its own\n```\n\nThe rest, too.\n", ["page.md:5: ', too': write also"]),
        ("code.py", '"""What a model holds."""\n', ["code.py:1: 'What a model holds.': write"]),
        ("code.py", "x = 1  # is told by the caller\n", ["code.py:1: 'is told': write"]),
        ("code.py", "beside = whichever = 1\n", []),
        ("page.md", "`beside` is a name. What does it do?\n", []),
    ],
)
def test_findings_name_file_line_and_phrase(name: str, text: str, expected: list[str]) -> None:
    findings = [*phrases.findings(name, text)]
    assert len(findings) == len(expected)
    assert all(line.startswith(start) for line, start in zip(findings, expected, strict=True))


def test_no_files_to_check_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases.subprocess, "check_output", lambda *args, **options: "")
    assert phrases.main() == 2
