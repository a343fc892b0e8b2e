"""Logs and capsules that cannot be written raise at the start, and never hide a failure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl_models.errors import DriftError, SaveError
from nrl_models.watch import Watch

TRAINER = torch.zeros(2, 4)
DRIFTED: dict[str, Any] = {"trainer": TRAINER, "engine": TRAINER - 1.0, "mask": TRAINER == 0}
HEALTHY = DRIFTED | {"engine": TRAINER}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("x")
    return tmp_path / "file"


def test_paths_that_cannot_be_written_raise_at_the_start(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="cannot write its results") as caught:
        Watch(capsule=file / "capsule.safetensors", log=[file / "watch.jsonl", tmp_path])
    assert str(caught.value).splitlines()[1:] == [
        f"  - {file}/watch.jsonl: {file} is not a directory",
        f"  - {file}/capsule.safetensors: {file} is not a directory",
        f"  - {tmp_path}: is a directory",
    ]
    assert Watch(capsule=tmp_path, log=tmp_path / "a" / "watch.jsonl").findings == []
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("fail", [True, False])
@pytest.mark.parametrize("what", ["capsule", "log", "function"])
def test_results_that_cannot_be_written_do_not_replace_the_failure(
    what: str, fail: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(values: dict[str, float], step: int) -> None:
        raise RuntimeError("no connection")

    folder = tmp_path / f"{what}-{fail}"
    target: dict[str, Any] = {"capsule": folder / "capsule.safetensors", "log": folder / "watch.jsonl"}
    watch = Watch(fail=fail, **({"log": broken} if what == "function" else {what: target[what]}))
    watch.before_update(**HEALTHY)
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("now a file")
    if fail:
        with pytest.raises(DriftError):
            watch.before_update(**DRIFTED)
    else:
        assert not watch.before_update(**DRIFTED).passed
    assert f"the watch could not write its {'capsule' if what == 'capsule' else 'log'} " in caplog.text


def test_one_broken_log_does_not_stop_the_others(tmp_path: Path) -> None:
    def broken(values: dict[str, float], step: int) -> None:
        raise RuntimeError("no connection either")

    seen: list[int] = []
    watch = Watch(log=[broken, lambda values, step: seen.append(step), tmp_path / "watch.jsonl"])
    watch.before_update(**HEALTHY)
    assert seen == [1]
    assert json.loads((tmp_path / "watch.jsonl").read_text())["step"] == 1
