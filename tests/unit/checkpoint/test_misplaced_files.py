"""Files of a checkpoint that are not where they are expected: pointers, other variants, subfolders and indexes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, WEIGHTS, assert_same, edit_config, edit_index
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as HFAuto
from transformers import LlamaForCausalLM as HFLlama

import nrl_models
from nrl_models import CheckpointError, registry
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.diagnostics.embeddings import diagnose_embeddings
from nrl_models.errors import ConsistencyError, UnknownArchitectureError
from nrl_models.inputs.processors import load_processor
from nrl_models.inputs.tokenizers import load_tokenizer


def require_checkpoint_error(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles(folder)
    return caught.value


@pytest.mark.parametrize("form", ["{folder}/{name}", "../shards/{name}", "./{name}", "below/../{name}"])
def test_index_path_that_leads_into_folder(shards: Path, form: str, tmp_path: Path) -> None:
    """transformers joins it with the directory."""
    (shards / "below").mkdir()
    expected = CheckpointFiles(shards).tensors

    def rename(entries: dict[str, str]) -> None:
        for key, name in list(entries.items())[1:]:
            entries[key] = form.format(folder=shards, name=name)

    edit_index(shards, rename)
    assert CheckpointFiles(shards).tensors == expected
    theirs = HFLlama.from_pretrained(shards).state_dict()
    assert_same(nrl_models.AutoModelForCausalLM.from_pretrained(shards).state_dict(), theirs)
    moved = shards.rename(tmp_path / "moved")
    if form.startswith(("{folder}", "../")):
        assert "outside the checkpoint" in str(require_checkpoint_error(moved))


def test_index_path_through_link_to_other_directory_raises(shards: Path, tmp_path: Path) -> None:
    """The system reads `link/..` as the parent of the link's target, which is not the checkpoint."""
    (tmp_path / "other" / "below").mkdir(parents=True)
    (shards / "link").symlink_to(tmp_path / "other" / "below")
    edit_index(shards, lambda entries: entries.update({key: f"link/../{file}" for key, file in entries.items()}))
    assert "outside the checkpoint" in str(require_checkpoint_error(shards))


def test_copy_with_new_rows_has_movable_index(shards: Path, tmp_path: Path) -> None:
    """An index with absolute paths would name the first checkpoint's files."""
    edit_index(shards, lambda entries: entries.update({key: str(shards / file) for key, file in entries.items()}))
    file = CheckpointFiles(shards).tensors["model.embed_tokens.weight"].file
    tensors = load_file(shards / file)
    tensors["model.embed_tokens.weight"][3] = 0.0
    save_file(tensors, shards / file, metadata={"format": "pt"})
    diagnose_embeddings(shards, reinitialize=tmp_path / "copy")
    loaded = HFLlama.from_pretrained(tmp_path / "copy")
    assert loaded.model.embed_tokens.weight[3].abs().sum() > 0


@pytest.mark.parametrize("metadata", ["x", 3, [1]])
def test_index_metadata_must_be_object(shards: Path, metadata: Any) -> None:
    content = json.loads((shards / INDEX).read_text()) | {"metadata": metadata}
    (shards / INDEX).write_text(json.dumps(content))
    error = require_checkpoint_error(shards)
    assert f"{INDEX}: has the metadata {metadata!r}, expected an object" in str(error)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 9\n"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "model-00002-of-00003.safetensors"])
def test_git_lfs_pointer_is_reported(shards: Path, name: str) -> None:
    name = sorted(shards.glob("model-*"))[1].name if "-of-" in name else name
    (shards / name).write_text(POINTER)
    with pytest.raises(CheckpointError) as caught:
        nrl_models.AutoModelForCausalLM.from_pretrained(shards)
    assert f"{name}: is a Git LFS pointer, not the file itself" in str(caught.value)
    assert str(caught.value).count("What to do") == 1
    assert "run `git lfs install` and `git lfs pull`" in str(caught.value)


def test_git_lfs_pointers_of_gguf_file_and_tokenizer_are_reported(tmp_path: Path) -> None:
    for name in ("model.gguf", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"model\.gguf: is a Git LFS pointer"):
        nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path / "model.gguf")
    with pytest.raises(ConsistencyError, match=r"preprocessor_config.json, tokenizer.json is a Git LFS pointer"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json: is a Git LFS pointer"):
        load_processor(tmp_path)


@pytest.mark.parametrize(
    ("present", "variant", "expected"),
    [
        (WEIGHTS, "fp16", ["its safetensors files are model.safetensors", "leave out variant"]),
        (
            "model.fp16.safetensors",
            None,
            ["are model.fp16.safetensors", "variant='fp16' to from_pretrained (comm"],
        ),
        ("model.safetensors.index.fp16.json", "fp15", ["pass variant='fp16'"]),
        ("model-00001-of-00002.safetensors", None, ["are model-00001-of-00002.safetensors", "download or save"]),
        ("model.fp16-00001-of-00002.safetensors", None, ["download or save"]),
    ],
)
def test_missing_weights_list_existing_ones(
    present: str, variant: str | None, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / present).touch()
    with pytest.raises(CheckpointError, match=r"has neither model") as caught:
        CheckpointFiles(tmp_path, variant)
    assert all(text in str(caught.value) for text in expected)
    assert ("variant=" in str(caught.value)) == any("variant=" in text for text in expected)


def test_file_of_checkpoint_suggests_directory(llama_checkpoint: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"is a file, expected a directory \(did you mean {llama_checkpoint}\?\)"
    ):
        resolve_folder(llama_checkpoint / "config.json")


def test_missing_subfolder_lists_those_with_a_checkpoint(llama_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such directory; directories with a config.json: none"):
        resolve_folder(tmp_path, subfolder="nowhere")
    for name in ("text_encoder", "policy"):
        shutil.copytree(llama_checkpoint, tmp_path / name)
    listed = "directories with a config.json: policy, text_encoder"
    with pytest.raises(CheckpointError, match=rf"polic: no such directory \(did you mean policy\?\); {listed}"):
        resolve_folder(tmp_path, subfolder="polic")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=rf"file: is a file, expected a directory; {listed}"):
        resolve_folder(tmp_path, subfolder="file")


@pytest.mark.parametrize(
    ("architectures", "advice"),
    [
        (["LlamaForCausalLM"], 'add "model_type": "llama" (for LlamaForCausalLM)'),
        (["OwnForCausalLM"], "add the model_type of the class that saved the checkpoint"),
        (None, "add the model_type of the class that saved the checkpoint"),
    ],
)
@pytest.mark.parametrize("model_type", [None, ""])
def test_config_without_model_type_raises(
    model_type: str | None, architectures: list[str] | None, advice: str, folder: Path
) -> None:
    edit_config(folder, model_type=model_type, architectures=architectures)
    with pytest.raises(UnknownArchitectureError, match=r"config.json has no model_type") as caught:
        nrl_models.AutoModelForCausalLM.from_pretrained(folder)
    assert f"What to do: {advice}" in str(caught.value)
    with pytest.raises(ValueError, match="model"):  # transformers' auto classes do not read architectures
        HFAuto.from_pretrained(folder)


@pytest.mark.parametrize("values", [{}, {"rms_norm_eps": 1}], ids=["valid", "integer"])
def test_model_class_loads_config_without_model_type(values: dict[str, Any], folder: Path) -> None:
    """As transformers' class does: the class selects the configuration's class, if the file does not."""
    edit_config(folder, **values)
    expected = registry.model_class("LlamaForCausalLM").from_pretrained(folder).state_dict()
    edit_config(folder, model_type=None)
    loaded = registry.model_class("LlamaForCausalLM").from_pretrained(folder)
    assert type(loaded.config) is HFLlama.config_class
    assert loaded.config.model_type == "llama"
    assert_same(loaded.state_dict(), expected)


@pytest.mark.parametrize("as_file", [False, True])
def test_config_argument_replaces_missing_file(as_file: bool, folder: Path, tmp_path: Path) -> None:
    expected = nrl_models.AutoModelForCausalLM.from_pretrained(folder)
    (tmp_path / "elsewhere").mkdir()
    file = (folder / "config.json").rename(tmp_path / "elsewhere" / "config.json")
    config: Any = file.parent if as_file else expected.config
    loaded = nrl_models.AutoModelForCausalLM.from_pretrained(folder, config=config)
    assert_same(loaded.state_dict(), expected.state_dict())
    with pytest.raises(CheckpointError, match=r"config.json: is missing"):
        nrl_models.AutoModelForCausalLM.from_pretrained(folder)
