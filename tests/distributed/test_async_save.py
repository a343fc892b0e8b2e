"""Asynchronous resume checkpoints: `save_checkpoint(..., wait=False)`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import async_save, checkpoint
from world import World

TIED: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("sizes", "architecture", "config"),
    [
        ({"fsdp": 2}, "LlamaForCausalLM", TIED),
        ({"tp": 2}, "LlamaForCausalLM", TIED),
        ({"ep": 2}, "MixtralForCausalLM", {"num_hidden_layers": 1}),
    ],
    ids=["fsdp-tied", "tp-tied", "ep"],
)
@pytest.mark.parametrize("optimizer", async_save.OPTIMIZERS)
def test_training_during_async_save_does_not_change_files(
    two: World, tmp_path: Path, optimizer: str, sizes: dict[str, int], architecture: str, config: dict[str, Any]
) -> None:
    job = partial(async_save.saves_both_ways, **sizes)
    for equal in two.run(job, str(tmp_path), architecture, config, optimizer):
        assert all(equal.values()), equal
        assert len(equal) >= 4


def test_async_save_copies_state_once(two: World, tmp_path: Path) -> None:
    for state, copied, left in two.run(partial(async_save.frees_the_copy, fsdp=2), str(tmp_path)):
        assert 0.9 * state <= copied <= state
        assert left == 0


def test_hashes_are_computed_while_writing(two: World, tmp_path: Path) -> None:
    assert two.run(partial(async_save.opened_for_reading, fsdp=2), str(tmp_path)) == [[], []]


@pytest.mark.parametrize("raised_by", ["wait", "next save", "wait on one rank"])
def test_failed_async_save_raises_once(two: World, tmp_path: Path, raised_by: str) -> None:
    first, second = two.run(partial(async_save.fails, fsdp=2), str(tmp_path), raised_by)
    if raised_by == "wait on one rank":
        # Rank 1 has handled its error, rank 0 has not. Both raise in the next save, so neither waits for the other.
        (raised,) = first
        assert raised.startswith("save 3: ShardingError")
        assert [text.partition(":")[0] for text in second] == ["wait", "save 3"]
        assert second[1].startswith("save 3: ShardingError")
        return
    source = "wait" if raised_by == "wait" else "save 3"
    assert first[0].startswith(f"{source}: ShardingError")
    assert "rank 1: is SaveError" in first[0] or "SaveError: cannot save into" in first[0]
    assert second[0].startswith(f"{source}: SaveError: cannot save into")
    assert "No space left on device" in second[0]
    assert len(first) == len(second) == 1


@pytest.mark.parametrize("dying", [0, 1])
def test_rank_crash_during_async_save_keeps_last_version(two: World, tmp_path: Path, dying: int) -> None:
    world = World(2)
    try:
        world.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path), 1)
        job = partial(checkpoint.dies_while_saving, fsdp=2, wait=False)
        (error,) = world.run_dying(dying, job, str(tmp_path), "write_blocks").values()
    finally:
        world.close()
    assert error[0] == "ShardingError"
    assert "is gone" in error[1]
    assert two.run(partial(checkpoint.loaded_values, fsdp=2), str(tmp_path)) == [[1]] * 2


@dataclass(frozen=True)
class Interpreter:
    """An interpreter that has imported torch, and runs jobs/async_save_alone.py in forks."""

    process: subprocess.Popen[str]

    def run(self, folder: Path, end: str) -> tuple[int, str, str]:
        """Save or load in a fork. Returns its exit status, stdout and stderr."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([str(folder), end]), file=self.process.stdin, flush=True)
        status, output, errors = json.loads(self.process.stdout.readline())
        return status, output, errors


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    command = [sys.executable, str(Path(__file__).parent / "jobs" / "async_save_alone.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Interpreter(process)
        process.kill()


@pytest.mark.parametrize("end", ["exits", pytest.param("forks", marks=pytest.mark.long)])
def test_interpreter_exit_waits_for_async_save(interpreter: Interpreter, tmp_path: Path, end: str) -> None:
    status, output, errors = interpreter.run(tmp_path, end)
    assert (status, output) == (0, "not done\n"), errors
    assert [path.name for path in tmp_path.iterdir()] == ["version-2"]
    assert "was not saved" not in errors
    assert interpreter.run(tmp_path, "loads")[1] == "2 [2.0]\n"


def test_failed_async_save_is_reported_at_exit(interpreter: Interpreter, tmp_path: Path) -> None:
    _, _, errors = interpreter.run(tmp_path, "fails")
    assert f"nrl_models: the last checkpoint was not saved into {tmp_path}\nSaveError: cannot save" in errors
    assert "No space left on device" in errors
    assert interpreter.run(tmp_path, "loads")[1] == "1 [1.0]\n"


def test_killed_async_save_keeps_last_version(interpreter: Interpreter, tmp_path: Path) -> None:
    status, _, errors = interpreter.run(tmp_path, "is killed")
    assert status == -signal.SIGKILL, errors
    (partial_file,) = tmp_path.glob(".version-2*/weights-*")
    assert partial_file.stat().st_size > 0
    assert interpreter.run(tmp_path, "loads")[1] == "1 [1.0]\n"
    assert [path.name for path in tmp_path.iterdir()] == ["version-2"], "the next save removes partial files"
