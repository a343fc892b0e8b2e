"""Results of `inspect`, `plan` and `quirks` that are used again without importing torch."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from nrl_models.cli import result_cache
from nrl_models.cli.result_cache import cached_result

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub")
"""Modules that no repeated command imports."""

COMMANDS = (("inspect",), ("plan", "--mesh", "fsdp=2"), ("quirks",))


def run_command(name: str, *options: str, cache: Path) -> tuple[str, str, list[str]]:
    """Return what a command prints on both streams, and which of `HEAVY` it imports."""
    code = (
        "import sys\nfrom nrl_models.cli import app\n"
        "status = app(prog_name='nrl-models', standalone_mode=False)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    environment = os.environ | {"NRL_MODELS_CACHE": str(cache), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", code, name, *options], capture_output=True, text=True, check=True, env=environment
    )
    *output, imported = done.stdout.splitlines()
    return "\n".join(output), done.stderr, json.loads(imported.replace("'", '"'))


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_repeated_command_imports_no_heavy_module(
    command: tuple[str, ...], llama_checkpoint: Path, tmp_path: Path
) -> None:
    content = json.loads((llama_checkpoint / "config.json").read_text()) | {"no_such_key": 1}  # causes a message
    checkpoint = shutil.copytree(llama_checkpoint, tmp_path / "checkpoint")
    (checkpoint / "config.json").write_text(json.dumps(content))
    name, *options = command
    first = run_command(name, str(checkpoint), *options, "--json", "-", cache=tmp_path / "cache")
    again = run_command(name, str(checkpoint), *options, "--json", "-", cache=tmp_path / "cache")
    assert "torch" in first[2]
    assert again[2] == []
    assert again[0] == first[0]
    assert "no_such_key" in again[1]
    assert [line for line in again[1].splitlines() if line not in first[1].splitlines()] == []
    json.loads(again[0])


class Computation:
    """A computation that counts its calls."""

    def __init__(self, effect: Callable[[], object] = lambda: None) -> None:
        self.calls = 0
        self.effect = effect

    def __call__(self) -> dict[str, int]:
        self.calls += 1
        self.effect()
        return {"calls": self.calls}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory, in a process that stores results although torch is imported."""
    monkeypatch.setenv("NRL_MODELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(result_cache, "HEAVY", frozenset())
    (tmp_path / "checkpoint" / "shards").mkdir(parents=True)
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "checkpoint" / "shards" / "model.safetensors").write_bytes(b"1234")
    return tmp_path / "checkpoint"


def test_result_is_computed_once(checkpoint: Path) -> None:
    compute = Computation()
    results = [cached_result("inspect", checkpoint, {"seq_len": 1}, compute) for _ in range(3)]
    assert results == [{"calls": 1}] * 3


def rewrite_shard(checkpoint: Path) -> None:
    """Write other bytes of the same size, with the old time of modification."""
    file = checkpoint / "shards" / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"5678")
    os.utime(file, ns=times)


@pytest.mark.parametrize(
    "change",
    [
        rewrite_shard,
        lambda checkpoint: (checkpoint / "config.json").write_text("{} "),
        lambda checkpoint: (checkpoint / "new.safetensors").touch(),
        lambda checkpoint: (checkpoint / "config.json").unlink(),
        lambda checkpoint: os.environ.update(NRL_MODELS_QUIRKS_OFF="token-types"),
        lambda checkpoint: sys.path.append(str(checkpoint)),
    ],
    ids=["shard", "config", "new file", "deleted file", "variable", "path"],
)
def test_result_is_computed_again_after_a_change(
    change: Callable[[Path], object], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("NRL_MODELS_QUIRKS_OFF", "")
    compute = Computation()
    cached_result("inspect", checkpoint, {}, compute)
    change(checkpoint)
    cached_result("inspect", checkpoint, {}, compute)
    assert compute.calls == 2


def test_result_depends_on_command_and_options(checkpoint: Path) -> None:
    compute = Computation()
    for command, options in (("plan", {}), ("inspect", {}), ("plan", {"seq_len": 2})):
        cached_result(command, checkpoint, options, compute)
    assert compute.calls == 3


def test_result_depends_on_installed_packages(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = checkpoint.parent / "packages"
    (packages / "torch-2.9.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    compute = Computation()
    cached_result("inspect", checkpoint, {}, compute)
    (packages / "torch-2.9.0.dist-info").rename(packages / "torch-2.9.1.dist-info")
    cached_result("inspect", checkpoint, {}, compute)
    assert compute.calls == 2


def test_result_is_not_stored_if_files_change_during_computation(checkpoint: Path) -> None:
    compute = Computation(lambda: rewrite_shard(checkpoint))
    assert [cached_result("inspect", checkpoint, {}, compute)["calls"] for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("reason", ["torch is imported", "family", "checkout", "many files", "hub repository"])
def test_result_is_not_stored(reason: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "torch is imported":
        monkeypatch.setattr(result_cache, "HEAVY", frozenset({"torch"}))
    elif reason == "family":
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ["a family"])
    elif reason == "checkout":
        monkeypatch.setattr(result_cache, "find_spec", lambda name: None)
    elif reason == "many files":
        monkeypatch.setattr(result_cache, "MOST_FILES", 3)
    path = Path("owner/name") if reason == "hub repository" else checkpoint
    compute = Computation()
    for _ in range(2):
        cached_result("inspect", path, {}, compute)
    assert compute.calls == 2


def test_error_is_not_stored(checkpoint: Path) -> None:
    def fail() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            cached_result("inspect", checkpoint, {}, fail)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"result": {}, "messages": 1}'])
def test_damaged_entry_is_replaced(content: str, checkpoint: Path) -> None:
    compute = Computation()
    cached_result("inspect", checkpoint, {}, compute)
    (entry,) = (checkpoint.parent / "cache" / "results").iterdir()
    entry.write_text(content)
    assert [cached_result("inspect", checkpoint, {}, compute)["calls"] for _ in range(2)] == [2, 2]


def test_unwritable_cache_is_ignored(checkpoint: Path) -> None:
    (checkpoint.parent / "cache").touch()
    assert cached_result("inspect", checkpoint, {}, Computation()) == {"calls": 1}


def test_oldest_results_are_deleted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "MOST_RESULTS", 2)
    for number in range(4):
        cached_result("inspect", checkpoint, {"number": number}, Computation())
    assert len(list((checkpoint.parent / "cache" / "results").iterdir())) == 2
    compute = Computation()
    cached_result("inspect", checkpoint, {"number": 3}, compute)
    assert compute.calls == 0


def test_cached_result_repeats_messages(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shown: list[str] = []

    def show(message: Warning | str, *_: object) -> None:
        shown.append(str(message))

    def effect() -> None:
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("nrl_models.loading").warning("a message")
        logging.getLogger("nrl_models.loading").info("no message")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        for _ in range(2):
            cached_result("inspect", checkpoint, {}, Computation(effect))
    assert shown == ["a warning"] * 2
    assert capsys.readouterr().err.count("a message") == 1
