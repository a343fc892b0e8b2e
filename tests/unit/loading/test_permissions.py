"""Files and directories that may not be read or written raise typed errors that say so."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nrl_models import AutoModelForCausalLM, start_engine
from nrl_models.errors import CheckpointError, SaveError
from nrl_models.onboarding.convert import convert

LOADS: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
    "hf-generate": lambda folder: start_engine("hf-generate", folder),
    "convert": lambda folder: convert(folder, folder.parents[1] / "converted"),
}


@pytest.fixture
def checkpoint(llama_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_checkpoint, tmp_path / "parent" / "checkpoint"))


def forbid(monkeypatch: pytest.MonkeyPatch, is_closed: Callable[[Path], bool], *names: str) -> None:
    """Let functions of `os` and `open` raise for some paths, because permissions do not apply to root."""

    def checked(original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | Path) and is_closed(Path(path)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    for module, name in [(builtins, "open"), *((os, name) for name in names)]:
        monkeypatch.setattr(module, name, partial(checked, getattr(module, name)))


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("closed", ["parent", "checkpoint"])
def test_unreadable_directory_raises(
    closed: str, load: Callable[[Path], Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(
        monkeypatch, lambda path: closed in path.parent.parts and "converted" not in path.parts, "stat", "lstat", "open"
    )
    with pytest.raises(CheckpointError, match=r"cannot be read: Permission denied[\s\S]*check the permissions"):
        load(checkpoint)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_configuration_is_not_reported_as_replaced(
    name: str, load: Callable[[Path], Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, lambda path: path.name == name, "open")
    with pytest.raises(CheckpointError, match=rf"{name}[\s\S]*Permission denied") as raised:
        load(checkpoint)
    assert "replaced" not in str(raised.value)


def test_save_below_unreadable_directory_raises(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    forbid(monkeypatch, lambda path: "closed" in path.parent.parts, "stat", "lstat", "mkdir", "open")
    target = checkpoint.parents[1] / "closed" / "saved"
    for save in (model.save_pretrained, lambda folder: convert(checkpoint, folder)):
        with pytest.raises(SaveError, match="Permission denied"):
            save(target)
