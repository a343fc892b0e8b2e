"""Reading untrusted JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nrl_models.common.checkpoint import json_reading
from nrl_models.common.checkpoint.json_reading import parsed, read_object
from nrl_models.errors import CheckpointError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a JSON object: Expecting value"),
        (b"null", "is not a JSON object: it is null"),
        (b"[{}]", "is not a JSON object: it is list"),
        (b"\xff{}", "is not a JSON object: 'utf-8' codec"),
        (b'{"a": %s}' % (b"9" * 5_000), "is not a JSON object: Exceeds the limit"),
        (b'{"a": %s%s}' % (b"[" * 70, b"]" * 70), "is nested deeper than 64 levels"),
        (b'{"a": %s%s}' % (b"[" * 10**5, b"]" * 10**5), "is nested deeper than 64 levels"),
        (b'{"a": 1}' + b" " * 1_000, "has more than 1,000 bytes"),
    ],
)
def test_invalid_json_raises(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "1,000" in message:
        monkeypatch.setattr(json_reading, "MOST_BYTES", 1_000)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_object(tmp_path / "config.json")
    assert [problem.subject for problem in caught.value.problems] == ["config.json"]


def test_unusual_but_valid_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": {"b": [1, "\\u0007", NaN]}, "a": 2, "ü": ' + "[" * 60 + "]" * 60 + "}")
    assert read_object(tmp_path / "a.json")["a"] == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda _: None], ids=["pipe", "directory", "missing"])
def test_non_file_path_raises(make: object, tmp_path: Path) -> None:
    make(tmp_path / "a.json")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"a\.json: cannot be read"):
        read_object(tmp_path / "a.json")


@dataclass(frozen=True)
class Hashes:
    files: dict[str, str]
    count: int = 0


@pytest.mark.parametrize("strict", [True, False])
def test_names_that_are_not_utf8_are_parsed(strict: bool) -> None:
    """Python reads such bytes of a file name as half of a surrogate pair."""
    name = os.fsdecode(b"notes-\xe9.json")
    assert parsed(Hashes, {"files": {name: "1f"}}, strict=strict) == Hashes({name: "1f"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "files is missing"),
        ({"files": {}, "size": 1}, "size is unknown"),
        ({"files": {}, "count": True}, "count is True"),
        ({"files": {}, "count": "1"}, "count is '1'"),
        ({"files": {"\udce9": 1}}, "is 1: Input should be a valid string"),
    ],
)
def test_wrong_values_name_their_field(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(Hashes, content, strict=True)
