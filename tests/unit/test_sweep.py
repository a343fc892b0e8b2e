"""A sweep records each outcome immediately, and resumes after an interruption."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sweep import Outcomes, Sweep
from tools.coverage_pages.results import Kind, read_records

A, B, C = NAMES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
RIGHT = dict.fromkeys(NAMES, "1")


class Swept:
    """A sweep over three architectures that records which ones ran."""

    def __init__(self, pages: Path, statuses: dict[str, str], version: str = "1", more: tuple[Kind, ...] = ()) -> None:
        self.ran: list[str] = []
        self.pages = 0
        self.statuses = statuses
        self.kinds = (Kind.TP, *more)
        versions = {kind: {"torch": version} for kind in self.kinds}
        self.sweep = Sweep(pages, NAMES, versions, self.run, self.worsened, self.write_page, frozenset({Kind.EP}))

    def run(self, names: list[str]) -> Iterator[tuple[str, Outcomes]]:
        for name in names:
            if self.statuses[name] == "crash":
                raise KeyboardInterrupt
            self.ran.append(name)
            yield name, {kind: {"status": self.statuses[name]} for kind in self.kinds if kind != Kind.EP}

    def worsened(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        return "worse" if now["status"] > before["status"] else ""

    def write_page(self) -> None:
        self.pages += 1


def statuses(pages: Path, kind: Kind = Kind.TP) -> dict[str, tuple[str, str]]:
    """Return the recorded outcomes and their versions."""
    return {
        name: (read_record.outcome["status"], read_record.versions["torch"])
        for name, read_record in read_records(pages)[kind].items()
    }


def test_sweep_resumes_after_interruption(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Swept(tmp_path, RIGHT | {B: "crash"}).sweep.go_on([])
    assert statuses(tmp_path) == {A: ("1", "1")}
    second = Swept(tmp_path, RIGHT)
    assert second.sweep.go_on([]) == 0
    assert second.ran == [B, C]
    assert second.pages == 2
    assert statuses(tmp_path) == dict.fromkeys(NAMES, ("1", "1"))


def test_rerun_of_all_resumes_after_interruption(tmp_path: Path) -> None:
    Swept(tmp_path, RIGHT).sweep.go_on([])
    with pytest.raises(KeyboardInterrupt):
        Swept(tmp_path, {A: "0", B: "crash", C: "0"}).sweep.go_on([], again=True)
    second = Swept(tmp_path, dict.fromkeys(NAMES, "0"))
    assert second.sweep.go_on([], again=True) == 0
    assert second.ran == [B, C]
    assert statuses(tmp_path) == dict.fromkeys(NAMES, ("0", "1"))
    third = Swept(tmp_path, RIGHT)
    third.sweep.go_on([], again=True)
    assert third.ran == NAMES


def test_worse_outcome_fails_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Swept(tmp_path, RIGHT).sweep.go_on([])
    assert Swept(tmp_path, RIGHT | {B: "2"}).sweep.go_on([B]) == 1
    assert f"{B}: tp: worse" in capsys.readouterr().err
    assert statuses(tmp_path)[B] == ("2", "1")


def test_outcomes_of_other_versions_are_kept_until_rerun(tmp_path: Path) -> None:
    Swept(tmp_path, RIGHT).sweep.go_on([])
    Swept(tmp_path, RIGHT, version="2").sweep.go_on([A])
    assert statuses(tmp_path) == {A: ("1", "2"), B: ("1", "1"), C: ("1", "1")}
    rest = Swept(tmp_path, RIGHT, version="2")
    rest.sweep.go_on([])
    assert rest.ran == [B, C]


def test_outcomes_of_unavailable_kinds_are_kept(tmp_path: Path) -> None:
    Swept(tmp_path, RIGHT, more=(Kind.QLORA,)).sweep.go_on([])
    Swept(tmp_path, RIGHT, version="2").sweep.go_on([A])  # without bitsandbytes
    assert statuses(tmp_path, Kind.QLORA) == dict.fromkeys(NAMES, ("1", "1"))
    assert statuses(tmp_path)[A] == ("1", "2")


def test_optional_kind_is_not_rerun(tmp_path: Path) -> None:
    swept = Swept(tmp_path, RIGHT, more=(Kind.EP,))
    swept.sweep.go_on([])
    swept.sweep.go_on([])
    assert swept.ran == NAMES


def test_sweep_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = Swept(tmp_path, RIGHT)
    for arguments, ran in (([C], [C]), (["--page"], []), ([], [A, B]), (["--again"], NAMES)):
        swept.ran.clear()
        monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
        assert swept.sweep.main(ArgumentParser()) == 0
        assert swept.ran == ran
    monkeypatch.setattr(sys, "argv", ["sweep", "d"])
    with pytest.raises(SystemExit, match="2"):
        swept.sweep.main(ArgumentParser())
