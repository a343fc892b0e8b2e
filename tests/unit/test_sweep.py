"""A sweep keeps outcomes as they come, and goes on where one stopped."""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweep import Outcome, Sweep, published


class Swept:
    """A sweep over three architectures, and what was run of it."""

    def __init__(self, results: Path, found: dict[str, str], version: str = "1") -> None:
        self.ran: list[str] = []
        self.pages: list[dict[str, Any]] = []
        self.found = found
        self.sweep = Sweep(results, ["a", "b", "c"], {"torch": version}, self.run, self.worsened, self.pages.append)

    def run(self, names: list[str]) -> Iterator[tuple[str, Outcome]]:
        for name in names:
            if self.found[name] == "crash":
                raise KeyboardInterrupt
            self.ran.append(name)
            yield name, {"status": self.found[name]}

    def worsened(self, before: Outcome, now: Outcome) -> str:
        return "worse" if now["status"] > before["status"] else ""


def test_it_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        Swept(file, {"a": "1", "b": "crash", "c": "1"}).sweep.go_on([])
    assert published(file)["outcomes"] == {"a": {"status": "1"}}
    second = Swept(file, {"a": "1", "b": "1", "c": "1"})
    assert second.sweep.go_on([]) == 0
    assert second.ran == ["b", "c"]
    assert second.pages[-1] == json.loads(file.read_text())
    assert list(published(file)["outcomes"]) == ["a", "b", "c"]


def test_a_second_run_of_all_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    Swept(file, {"a": "1", "b": "1", "c": "1"}).sweep.go_on([])
    with pytest.raises(KeyboardInterrupt):
        Swept(file, {"a": "0", "b": "crash", "c": "0"}).sweep.go_on([], again=True)
    second = Swept(file, {"a": "0", "b": "0", "c": "0"})
    assert second.sweep.go_on([], again=True) == 0
    assert second.ran == ["b", "c"]
    assert published(file) == {"versions": {"torch": "1"}, "outcomes": {name: {"status": "0"} for name in "abc"}}


def test_what_came_out_worse_fails_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    Swept(file, {"a": "1", "b": "1", "c": "1"}).sweep.go_on([])
    assert Swept(file, {"a": "1", "b": "2", "c": "1"}).sweep.go_on(["b"]) == 1
    assert "b: worse" in capsys.readouterr().err
    assert published(file)["outcomes"]["b"] == {"status": "2"}


def test_outcomes_of_other_versions_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    Swept(file, {"a": "1", "b": "1", "c": "1"}).sweep.go_on([])
    Swept(file, {"a": "1"}, version="2").sweep.go_on(["a"])
    assert published(file) == {"versions": {"torch": "2"}, "outcomes": {"a": {"status": "1"}}}


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    swept = Swept(file, {"a": "1", "b": "1", "c": "1"})
    for arguments, ran in ((["c"], ["c"]), (["--page"], []), ([], ["a", "b"]), (["--again"], ["a", "b", "c"])):
        swept.ran.clear()
        monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
        assert swept.sweep.main(ArgumentParser()) == 0
        assert swept.ran == ran
    monkeypatch.setattr(sys, "argv", ["sweep", "d"])
    with pytest.raises(SystemExit):
        swept.sweep.main(ArgumentParser())
