"""Links that lead out of a checkpoint raise CheckpointError. Links inside it and in the hub's cache load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_unsafe_files import LOADS, load_quantized
from transformers import PreTrainedTokenizerFast

from nrl_models import AutoModelForCausalLM, check_parity, start_engine
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.errors import CheckpointError
from nrl_models.inputs.tokenizers import end_tokens, load_tokenizer
from nrl_models.loading.read_config import read_config
from nrl_models.testing.suite.asserts import assert_same_tensors

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"

READS: dict[str, Callable[[Path], Any]] = {
    **LOADS,
    "configuration": read_config,
    "config=": lambda folder: AutoModelForCausalLM.from_pretrained(folder, config=folder / CONFIG),
    "vllm": lambda folder: start_engine("vllm", folder),
    "tokenizer": load_tokenizer,
    "end tokens": lambda folder: end_tokens(folder, None),  # type: ignore[arg-type]
}


@pytest.fixture
def checkpoint(llama_checkpoint: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(llama_checkpoint, tmp_path / "checkpoint"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def move_out(folder: Path, name: str, target: Path) -> None:
    """Move a file out of a checkpoint, and replace it by a link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(folder / name, target)
    (folder / name).symlink_to(os.path.relpath(target, folder))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("name", [CONFIG, GENERATION, WEIGHTS, "tokenizer_config.json"])
def test_symlink_out_of_directory_raises(name: str, read: Callable[[Path], Any], checkpoint: Path) -> None:
    if read is load_quantized:  # this function writes config.json
        shutil.copy(checkpoint / CONFIG, checkpoint.parent / "before")
    move_out(checkpoint, name, checkpoint.parent / "elsewhere" / name)
    with pytest.raises(CheckpointError, match=rf"{name}: is a link that leads out of the checkpoint"):
        read(checkpoint)


def test_all_symlinks_out_of_directory_are_listed(checkpoint: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        move_out(checkpoint, name, checkpoint.parent / "elsewhere" / name)
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(checkpoint)
    assert [problem.subject for problem in caught.value.problems] == [CONFIG, WEIGHTS]
    assert "if you trust them" in str(caught.value)


def test_symlinked_chat_template_raises(checkpoint: Path) -> None:
    (checkpoint.parent / "secret").write_text("x")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tools.jinja").symlink_to(checkpoint.parent / "secret")
    with pytest.raises(CheckpointError, match=r"additional_chat_templates/tools\.jinja"):
        load_tokenizer(checkpoint)


def test_shards_in_symlinked_directory_raise(llama_shards: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama_shards, tmp_path / "checkpoint"))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"shards/model-'))
    (tmp_path / "elsewhere").mkdir()
    for shard in folder.glob("model-*"):
        shutil.move(shard, tmp_path / "elsewhere" / shard.name)
    (folder / "shards").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link that leads out of the checkpoint"):
        CheckpointFiles(folder)


def test_symlinks_inside_directory_load(checkpoint: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    for name in (CONFIG, WEIGHTS):
        move_out(checkpoint, name, checkpoint / "files" / name)
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(checkpoint).state_dict(), expected)
    assert check_parity(checkpoint, checks=["1"]).passed


@pytest.mark.parametrize("subfolder", ["", "part"])
def test_hub_cache_symlinks_load(subfolder: str, checkpoint: Path, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    shutil.copytree(checkpoint, snapshot / subfolder)
    for path in list((snapshot / subfolder).iterdir()):
        move_out(path.parent, path.name, repository / "blobs" / path.name)
    folder = snapshot / subfolder
    model = AutoModelForCausalLM.from_pretrained(snapshot, subfolder=subfolder)
    assert_same_tensors(model.state_dict(), expected)
    assert check_parity(folder, checks=["1"]).passed
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(checkpoint / WEIGHTS)
    with pytest.raises(CheckpointError, match="leads out"):
        AutoModelForCausalLM.from_pretrained(snapshot, subfolder=subfolder)


def test_symlink_to_checkpoint_directory_loads(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(checkpoint)
    AutoModelForCausalLM.from_pretrained(tmp_path / "latest")


def test_symlinks_of_unread_files_are_ignored(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (checkpoint / "logs").symlink_to(tmp_path / "logs")
    (checkpoint / "optimizer.pt").symlink_to(tmp_path / "absent")
    AutoModelForCausalLM.from_pretrained(checkpoint)


def test_symlinked_gguf_file_raises(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.gguf").symlink_to(tmp_path / "absent.gguf")
    (tmp_path / "absent.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="leads out"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")


def test_circular_symlink_raises(checkpoint: Path) -> None:
    (checkpoint / GENERATION).unlink()
    (checkpoint / GENERATION).symlink_to(GENERATION)
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / WEIGHTS).symlink_to(WEIGHTS)
    with pytest.raises(CheckpointError, match=WEIGHTS):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_tokenizer_in_directory_loads(checkpoint: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))).save_pretrained(
        checkpoint
    )
    assert load_tokenizer(checkpoint).get_vocab() == {"a": 0, "b": 1}
