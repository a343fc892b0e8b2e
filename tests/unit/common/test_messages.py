"""Untrusted names in error messages and logs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import WEIGHTS, edit_weights

from nrl_models import AutoModelForCausalLM
from nrl_models.common.logs import get_logger
from nrl_models.errors import CheckpointError, EngineError, FamilyImportError, Problem, ProblemKind, visible

NAMES = ("a\x1b[2Jb", "a\nerror: forged", "a\rb", "a\u202eb", "a\u2028b", "a\x9b31mb", "a\x00b", "a\ud800b")


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_names_are_escaped_in_all_messages(name: str) -> None:
    shown = ascii(name)[1:-1]
    problem = Problem(ProblemKind.MISSING, name, f"beside {name}", name, advice=f"remove {name}")
    error = CheckpointError(f"cannot load {name}", [problem], [f"look at {name}"])
    for message, lines in (
        (error, 4),
        (EngineError(f"no {name}"), 1),
        (FamilyImportError(f"no {name}", "nor this"), 2),
    ):
        assert len(str(message).split("\n")) == lines
        assert all(line.isprintable() for line in str(message).split("\n"))
        assert shown in str(message)
    assert (problem.subject, problem.file) == (name, name)  # attributes hold the original name


def test_logged_warning_escapes_names(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("nrl_models.of_this_test").warning("skipped %s", "a\x1b[2Jb")
    assert caplog.messages == [r"skipped a\x1b[2Jb"]


def test_visible_keeps_unicode_and_truncates() -> None:
    assert visible("größe, 模型, 'x'") == "größe, 模型, 'x'"
    assert len(visible("x" * 10**6)) < 3_000


def test_error_pickle_round_trip() -> None:
    error = CheckpointError("cannot load", [Problem(ProblemKind.FILE, "a\nb", "is missing")], ["look again"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)


def test_errors_keep_all_lines_and_transformers_types(folder: Path) -> None:
    """`OSError` interprets its arguments as a number, a message and files, and keeps only two of them."""
    problems = [Problem(ProblemKind.MISSING, f"layer.{number}", "not found") for number in range(4)]
    error = CheckpointError("cannot load x", problems, ["save it again"])
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert str(copy).splitlines() == [
            "cannot load x (4 problems)",
            *(f"  - {problem}" for problem in problems),
            "  What to do: save it again",
        ]
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):  # as for any other shape mismatch
        AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(OSError, match=r"has neither model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(OSError, match="no such directory"):
        AutoModelForCausalLM.from_pretrained(folder / "missing")
