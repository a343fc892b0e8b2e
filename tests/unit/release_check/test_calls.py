"""Calls of upstream functions are compared with the signatures of the baseline and of the installed version."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

import nrl_models
from tests.unit.release_check.wheels import sources
from tools.release_check.findings import Kind
from tools.release_check.upstream_code.calls import MODULES, changed_calls, upstream_function
from tools.release_check.upstream_code.our_code import imported_calls

MODULE = "transformers.planted"
BEFORE = (
    "def place(model, memory, folder=None): ...\n"
    "class Schedule:\n"
    "    def __init__(self, name, steps): ...\n"
    "    @classmethod\n"
    "    def register(cls, key, value): ...\n"
)
AFTER = (
    "def place(model, quantizer=None, memory=None): ...\n"
    "class Schedule:\n"
    "    def __init__(self, name, warmup, steps=0): ...\n"
    "    @classmethod\n"
    "    def register(cls, value, key): ...\n"
)
IMPORTS = f"from transformers import planted\nfrom {MODULE} import Schedule, place as put\n"


@pytest.mark.parametrize(
    ("call", "function", "detail"),
    [
        ("put(model, memory)", "place", "memory"),
        ("planted.place(model, memory)", "place", "memory"),
        ("put(model=model, folder=1)", "place", "arguments"),
        ("put(*args, folder=1)", "place", "arguments"),
        ("Schedule('a', 3)", "Schedule", "steps"),
        ("Schedule(steps=3)", "Schedule", "arguments"),
        ("Schedule.register(key=1)", "Schedule.register", "arguments"),
        ("put(model, memory=1)", "", ""),
        ("put(*args, **kwargs)", "", ""),
        ("Schedule('a', warmup=1, steps=3)", "", ""),
        ("Schedule.register(key=1, value=2)", "", ""),
        ("other(model, memory)", "", ""),
    ],
)
def test_changed_call(
    call: str, function: str, detail: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = tmp_path_factory.mktemp("checkout")  # calls are cached by path, and `tmp_path` may be used again
    planted = ModuleType(MODULE)
    exec(AFTER, vars(planted))
    monkeypatch.setitem(sys.modules, MODULE, planted)
    monkeypatch.setattr("transformers.planted", planted, raising=False)
    (tmp_path / "nrl_models").mkdir()
    (tmp_path / "nrl_models" / "planted.py").write_text(f"{IMPORTS}{call}\n")
    found = list(changed_calls(tmp_path, sources(tmp_path, "1.0", {"transformers/planted.py": BEFORE})))
    assert [(one.kind, one.subject, one.detail) for one in found] == (
        [(Kind.CHANGED_CALL, f"{MODULE}:{function}", detail)] if detail else []
    )


def test_moved_parameters_are_one_finding_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = ModuleType(MODULE)
    exec(AFTER, vars(planted))
    monkeypatch.setitem(sys.modules, MODULE, planted)
    (tmp_path / "nrl_models").mkdir()
    (tmp_path / "nrl_models" / "planted.py").write_text(f"{IMPORTS}Schedule.register(1, 2)\n")
    found = changed_calls(tmp_path, sources(tmp_path, "1.0", {"transformers/planted.py": BEFORE}))
    assert [one.detail for one in found] == ["key", "value"]


def test_at_most_two_arguments_of_transformers_are_passed_by_position() -> None:
    checkout = Path(nrl_models.__path__[0]).parent
    unnamed = [
        f"{call.place} {call.names[-1]}"
        for call in imported_calls(checkout, MODULES)
        if sum(not isinstance(argument, ast.Starred) for argument in call.node.args) > 2
        and upstream_function(call) is not None
    ]
    assert not unnamed, f"pass these arguments by name: {unnamed}"
