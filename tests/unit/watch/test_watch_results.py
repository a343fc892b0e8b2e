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


def test_unwritable_paths_raise_at_start(file: Path, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("target_kind", ["capsule", "log", "function"])
def test_write_error_does_not_replace_drift_error(
    target_kind: str, fail: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(values: dict[str, float], step: int) -> None:
        raise RuntimeError("no connection")

    folder = tmp_path / f"{target_kind}-{fail}"
    target: dict[str, Any] = {"capsule": folder / "capsule.safetensors", "log": folder / "watch.jsonl"}
    watch = Watch(fail=fail, **({"log": broken} if target_kind == "function" else {target_kind: target[target_kind]}))
    watch.before_update(**HEALTHY)
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("now a file")
    if fail:
        with pytest.raises(DriftError):
            watch.before_update(**DRIFTED)
    else:
        assert not watch.before_update(**DRIFTED).passed
    assert f"the watch could not write its {'capsule' if target_kind == 'capsule' else 'log'} " in caplog.text


def test_broken_log_does_not_stop_other_logs(tmp_path: Path) -> None:
    def broken(values: dict[str, float], step: int) -> None:
        raise RuntimeError("no connection either")

    seen: list[int] = []
    watch = Watch(log=[broken, lambda values, step: seen.append(step), tmp_path / "watch.jsonl"])
    watch.before_update(**HEALTHY)
    assert seen == [1]
    assert json.loads((tmp_path / "watch.jsonl").read_text())["step"] == 1
