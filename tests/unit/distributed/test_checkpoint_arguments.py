"""Arguments of resume checkpoints: directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.errors import CheckpointError, UnknownArgumentError


@pytest.fixture
def model() -> Iterator[Any]:
    """A model that is sharded over one rank."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    yield parallelize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), mesh)
    dist.destroy_process_group()


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_expand_home_directory(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    version = save_checkpoint("~/run", model, None, {"step": 1}, wait=wait).wait()
    assert version == tmp_path / "run" / "version-1"
    assert load_checkpoint("~/run", model) == {"step": 1}


@pytest.mark.parametrize("folder", ["", 3, "a\0b", "x" * 300, "~nobody-of-that-name/x"], ids=ascii)
def test_paths_that_no_directory_can_have_raise(
    model: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownArgumentError, match="directory to save into"):
        save_checkpoint(folder, model)
    with pytest.raises((CheckpointError, UnknownArgumentError), match=r"is not a path|path is empty|expected a dir"):
        load_checkpoint(folder, model)
    assert not list(tmp_path.iterdir())
