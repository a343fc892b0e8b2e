"""A reader finds a complete checkpoint during a save, and after a save was killed.

`tests/campaign/test_kill_points.py` does the same for every pair of generations, with thousands of schedules.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, edit_weights

from nrl_models import AutoModelForCausalLM, CheckpointError
from nrl_models.common.checkpoint import generations, writing
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.generations import PUBLISHED, RECORD, FileWatch
from nrl_models.common.checkpoint.local_path import GENERATION_NAME
from nrl_models.common.checkpoint.publication import durable, locks, publishing
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.checkpoint.writing import require_replaceable, staged, write_whole
from nrl_models.diagnostics.embeddings import write_reinitialized
from nrl_models.errors import ProblemKind, SaveError
from nrl_models.loading import pretrained
from nrl_models.onboarding import convert as convert_module
from nrl_models.onboarding.convert import convert
from tests.campaign.publishing import (
    OTHERS,
    Generation,
    Writer,
    WrongError,
    after_kills,
    any_schedule,
    calls,
    check_saved,
    files_of,
    kill_at_every_call,
    make_generations,
    overlapped,
    prepare,
    read,
    save_and_be_killed,
)

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # about fork, since Python 3.12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Generation]:
    """Generations of a checkpoint, each in a separate folder."""
    return make_generations(tmp_path_factory.mktemp("generations"))


def folder_after_killed_save(saved: list[Generation], folder: Path) -> Path:
    """Return a folder of generation 0 in which the save of generation 2 was killed while publishing."""
    target = prepare(folder, saved[0])
    at = 1
    while save_and_be_killed(saved[2], target, at) and not (target / PUBLISHED).exists():
        target = prepare(folder, saved[0])
        at += 1
    assert (target / PUBLISHED).exists()
    return target


# Killed and concurrent saves


@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), [(0, 2), (None, 1)])
def test_save_killed_at_every_call(saved: list[Generation], old: int | None, new: int, tmp_path: Path) -> None:
    assert kill_at_every_call(tmp_path / "work", saved, old, new, following=3) > 4


@pytest.mark.long
def test_consecutive_killed_saves(saved: list[Generation], tmp_path: Path) -> None:
    choose = random.Random(0)
    for _ in range(10):
        writers = [(choose.randrange(4), choose.randrange(1, 45)) for _ in range(3)]
        after_kills(tmp_path / "work", saved, choose.randrange(4), writers, choose.randrange(4))


@pytest.mark.long
def test_save_between_any_two_reader_calls(saved: list[Generation], tmp_path: Path) -> None:
    """The reader starts again and raises no error."""
    at, steps = 0, 0
    while at <= steps:
        found, steps, _ = overlapped(
            tmp_path / "work", saved, (2, 1), lambda step, at=at: 1000 if step == at else 0, at
        )
        assert found is not None
        at += 1
    assert at > 30


@pytest.mark.long
@pytest.mark.parametrize("first", [3, *(pytest.param(first, marks=pytest.mark.long) for first in (4, 5))])
def test_publishing_rename_between_any_two_reader_calls(saved: list[Generation], first: int, tmp_path: Path) -> None:
    """The writer stops near the rename and continues call by call during the read. Two places then hold generations.

    Tries every third call of the reader; `tests/campaign/test_kill_points.py` tries all.
    """
    at, steps = 0, 0
    while at <= steps:
        schedule = {0: first, at: 1} if at else {0: first}
        _, steps, _ = overlapped(tmp_path / "work", saved, (2, 1), lambda step, now=schedule: now.get(step, 0), at)
        at += 3 if at else 1 + first % 3


def test_random_schedules_of_reader_and_writer(saved: list[Generation], tmp_path: Path) -> None:
    for seed in range(30):
        choose = random.Random(seed)
        schedule = any_schedule(choose, often=[0.05, 0.2, 0.6])
        old, new = choose.sample(range(4), 2)
        overlapped(tmp_path / "work", saved, (old, new), schedule, seed)


def test_generation_config_moved_during_read_is_used(
    saved: list[Generation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folder_after_killed_save(saved, tmp_path / "work")
    settings = json.loads((target / PUBLISHED / GENERATION_NAME).read_text())
    settings["temperature"] = 0.25
    (target / PUBLISHED / GENERATION_NAME).write_text(json.dumps(settings | {"do_sample": True}))
    read_settings, moved = pretrained.generation_config, []

    def move_first(*args: Any) -> Any:
        if not moved:
            publishing.complete(target)
            moved.append(True)
        return read_settings(*args)

    monkeypatch.setattr(pretrained, "generation_config", move_first)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert not (target / PUBLISHED).exists()
    assert model.generation_config.temperature == 0.25


def publish_file_by_file(stage: Path, target: Path) -> None:
    """Publish file by file, as earlier versions did."""
    for path in sorted(stage.iterdir()):
        os.replace(path, target / path.name)


KILL, OVERLAP = "killed", "overlapped"

BUGS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "no log": (KILL, lambda patch: patch.setattr(writing, "publish", publish_file_by_file)),
    "no completion": (KILL, lambda patch: patch.setattr(publishing, "complete", lambda *_, **__: None)),
    "weights published first": (KILL, lambda patch: patch.setattr(publishing, "_rank", lambda name: 0)),
    "no cleanup": (KILL, lambda patch: patch.setattr(writing, "remove_dead", lambda *_: None)),
    "log is ignored": (KILL, lambda patch: patch.setattr(generations, "current", lambda folder: folder)),
    "no replacement check": (OVERLAP, lambda patch: patch.setattr(FileWatch, "replaced", lambda self: [])),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_checks_detect_injected_bugs(
    saved: list[Generation], bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detected_by, plant = BUGS[bug]
    plant(monkeypatch)
    if detected_by == KILL:
        with pytest.raises((WrongError, SaveError)):
            kill_at_every_call(tmp_path / "work", saved, 0, 3, following=1)
    else:
        with pytest.raises(WrongError):
            test_save_between_any_two_reader_calls(saved, tmp_path)


# Folders written by other programs


def test_foreign_write_after_killed_save_raises(saved: list[Generation], tmp_path: Path) -> None:
    target = folder_after_killed_save(saved, tmp_path / "work")
    assert read(target, saved) == 2
    shutil.copytree(saved[3].folder, target, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"another program .* interrupted[\s\S]*delete") as caught:
        AutoModelForCausalLM.from_pretrained(target)
    assert {problem.kind for problem in caught.value.problems} == {ProblemKind.REPLACED}
    assert {problem.subject for problem in caught.value.problems} >= {"config.json", WEIGHTS}
    Writer(saved[1], target, lambda: None).save()
    check_saved(target, saved[1], set(OTHERS))
    assert read(target, saved) == 1


def test_convert_and_copy_after_killed_save(saved: list[Generation], tmp_path: Path) -> None:
    target = folder_after_killed_save(saved, tmp_path / "work")
    with pytest.raises(CheckpointError, match="in place"):
        convert(target, target)
    with pytest.raises(CheckpointError, match="in place"):
        require_replaceable(resolve_folder(target), target, overwrite=True)
    convert(target, tmp_path / "converted")
    write_reinitialized(resolve_folder(target), tmp_path / "copied", [], 0)
    for folder in (tmp_path / "converted", tmp_path / "copied"):
        assert read(folder, saved) == 2
        assert (folder / "optimizer.pt").exists() == (folder.name == "copied")
        assert (folder / "merges.txt").read_text() == "merges.txt 2"
        assert not list(folder.glob(".*"))
    assert (tmp_path / "converted" / "logs" / "model.txt").read_text() == "log"


@pytest.mark.parametrize("before", ["_require_same_architecture", "_require_finite"])
def test_convert_reads_one_generation(
    before: str, saved: list[Generation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save replaces the source once while it is converted, before or after its weights are read."""
    source, step, published = prepare(tmp_path / "work", saved[0]), getattr(convert_module, before), []

    def publish_first(*args: Any) -> None:
        if not published:
            Writer(saved[2], source, lambda: None).save()
            published.append(True)
        step(*args)

    monkeypatch.setattr(convert_module, before, publish_first)
    convert(source, tmp_path / "converted")
    assert read(tmp_path / "converted", saved) == 2
    assert (tmp_path / "converted" / "merges.txt").read_text() == "merges.txt 2"


def test_foreign_publishing_log_raises(saved: list[Generation], tmp_path: Path) -> None:
    target = prepare(tmp_path / "work", saved[0])
    (target / PUBLISHED).mkdir()
    (target / PUBLISHED / "thesis.tex").write_text("mine")
    assert read(target, saved) == 0
    with pytest.raises(SaveError, match="move it away"):
        Writer(saved[1], target, lambda: None).save()
    for record in ({"replaces": {"../../thesis.tex": [1, 2]}, "files": []}, [], None):
        (target / PUBLISHED / RECORD).write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match="cannot load"):
            AutoModelForCausalLM.from_pretrained(target)
        with pytest.raises(SaveError, match="move it away"):
            Writer(saved[1], target, lambda: None).save()
    shutil.rmtree(target / PUBLISHED)
    assert files_of(target) == saved[0].files | set(OTHERS)
    assert read(target, saved) == 0


def test_file_changed_in_place_raises_on_read(folder: Path) -> None:
    files = CheckpointFiles(folder)
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="replaced or changed by another process"):
        files.read(next(iter(files.tensors.values())))


def test_replaced_file_is_read_as_opened(folder: Path) -> None:
    files = CheckpointFiles(folder)
    expected = {key: files.read(tensor).clone() for key, tensor in files.tensors.items()}
    files.close()
    files = CheckpointFiles(folder)
    shutil.copy(folder / WEIGHTS, folder / "other.safetensors")
    edit_weights(folder, lambda tensors: [tensor.zero_() for tensor in tensors.values()], "other.safetensors")
    os.replace(folder / "other.safetensors", folder / WEIGHTS)
    assert all(torch.equal(files.read(tensor), expected[key]) for key, tensor in files.tensors.items())


# Disk errors


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Limit the file size of this process."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_file_size_limit_keeps_old_checkpoint(
    saved: list[Generation], tmp_path: Path, limited: Callable[[int], None]
) -> None:
    target = prepare(tmp_path / "work", saved[0])
    model = AutoModelForCausalLM.from_pretrained(saved[2].folder)
    limited(4096)
    with pytest.raises(SaveError, match=r"(?i)file too large.*did not change"):
        model.save_pretrained(target)
    with pytest.raises(SaveError, match=r"report\.json.*did not change"):
        write_whole(target / "report.json", "x" * 10_000)
    check_saved(target, saved[0], set(OTHERS))


CALLS_THAT_NEED_SPACE = ("mkdir", "open", "link", "symlink", "rename", "replace")


def test_disk_full_at_any_call(saved: list[Generation], tmp_path: Path) -> None:
    """From one call on, every call that needs disk space fails. The save raises, and leaves a complete checkpoint."""
    at, found, failed = 0, [], True
    while failed:
        at, failed, message = at + 1, False, ""
        target, left = prepare(tmp_path / "work", saved[0]), at
        writer = Writer(saved[2], target, lambda: None)

        def full(name: str, writes: bool, writer: Writer = writer) -> None:
            nonlocal left
            if writes and name in CALLS_THAT_NEED_SPACE and not writer.filling:
                left -= 1
                if left <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")

        try:
            with calls(full):
                writer.save()
        except SaveError as error:
            failed, message = True, str(error)
        found.append(read(target, saved))
        assert found[-1] == (2 if not failed or "is saved" in message else 0)
        assert not failed or "is saved" in message or "did not change" in message
        Writer(saved[1], target, lambda: None).save()
        check_saved(target, saved[1], set(OTHERS))
    assert found[0] == 0
    assert found[-1] == 2


def test_read_only_folder_raises(saved: list[Generation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    target = prepare(tmp_path / "work", saved[0])
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(
        SaveError, match=r"Read-only file system\. Existing files did not change; use another directory"
    ):
        AutoModelForCausalLM.from_pretrained(target).save_pretrained(target)
    check_saved(target, saved[0], set(OTHERS))


def test_files_are_synced_before_publishing(
    saved: list[Generation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(durable.VARIABLE, "1")
    target, synced = prepare(tmp_path / "work", saved[0]), set()
    fsync, rename = os.fsync, os.rename

    def noted(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.add((status.st_dev, status.st_ino))
        fsync(descriptor)

    def checked(old: Path, new: Path) -> None:
        if Path(new).name == PUBLISHED:
            inside = [old, *(path for path in old.iterdir() if not path.is_symlink())]
            assert {(path.stat().st_dev, path.stat().st_ino) for path in inside} <= synced
            synced.clear()
        elif Path(old).name == PUBLISHED:
            assert (target.stat().st_dev, target.stat().st_ino) in synced
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked)
    Writer(saved[2], target, lambda: None).save()
    check_saved(target, saved[2], set(OTHERS))


# Several writers


def test_locked_folder_times_out(saved: list[Generation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = prepare(tmp_path / "work", saved[0])
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.05)
    with locks.locked(target), pytest.raises(SaveError, match="another process has been saving into it"):
        Writer(saved[1], target, lambda: None).save()
    check_saved(target, saved[0], set(OTHERS))
    Writer(saved[1], target, lambda: None).save()
    check_saved(target, saved[1], set(OTHERS))


def test_concurrent_writers_of_new_folder(saved: list[Generation], tmp_path: Path) -> None:
    target = prepare(tmp_path / "work", None)
    with staged(target) as outer:
        shutil.copytree(saved[1].folder, outer, dirs_exist_ok=True)
        Writer(saved[0], target, lambda: None).save()
    check_saved(target, saved[1], set())
    assert resolve_folder(target) == target


def test_concurrent_stages_are_kept(tmp_path: Path) -> None:
    with staged(tmp_path) as stage, staged(tmp_path) as other:
        assert stage.is_dir()
        with staged(stage) as same:
            assert same == stage
        (other / "a").write_text("1")
        (stage / "b").write_text("2")
    assert files_of(tmp_path) == {"a", "b"}


def test_write_whole_to_symlink_and_device(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "1")
    assert (tmp_path / "file").read_text() == "1"
    assert files_of(tmp_path) == {"link", "file"}
    write_whole(Path(os.devnull), "2")
    assert not Path(os.devnull).is_file()
