"""Converting a checkpoint to another dtype or another number of shards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import INDEX, WEIGHTS, assert_same, edit_config, new_model, problems, stored, weight_map
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from transformers import LlamaConfig, PersimmonConfig, PreTrainedModel
from transformers import LlamaForCausalLM as HFLlama
from transformers import MixtralForCausalLM as HFMixtral

from nrl_models import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CheckpointError,
    UnknownArchitectureError,
    UnknownArgumentError,
)
from nrl_models.certify.certified import file_hashes
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.onboarding.convert import convert
from nrl_models.testing.tiny import tiny_config

OTHERS = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "LICENSE": "free",
    ".gitattributes": "*.safetensors filter=lfs",
    "assets/logo/small.png": "picture",
}
OLD_WEIGHTS = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "onnx/model.onnx_data",
    ".git/HEAD",
    ".cache/huggingface/download/config.json.metadata",
)


@pytest.fixture
def full(folder: Path) -> Path:
    """A checkpoint with all the files that repositories contain."""
    for name in (*OTHERS, *OLD_WEIGHTS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(OTHERS.get(name, "old"))
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_convert_to_dtype(dtype: torch.dtype, folder: Path, llama: PreTrainedModel, tmp_path: Path) -> None:
    words = convert(folder, tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    assert_same(stored(tmp_path / "out"), {name: tensor.to(dtype) for name, tensor in llama.state_dict().items()})
    size = sum(tensor.numel() for tensor in llama.state_dict().values()) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    assert words == f"{len(llama.state_dict())} tensors, {size / 1e9:.3f} GB, {name}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == name
    assert HFLlama.from_pretrained(tmp_path / "out").dtype == dtype


def test_overflow_in_target_dtype_raises(mixtral_checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral_checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[1, 3, 5] = 70144
        model.model.layers[1].input_layernorm.weight[0] = float("inf")  # infinite in the checkpoint
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(CheckpointError, match="infinite in float16") as caught:
        convert(tmp_path / "large", tmp_path / "half", dtype="float16")
    (problem,) = caught.value.problems
    assert problem.subject == "model.layers.0.mlp.experts.down_proj"
    assert "to 70144, and float16 ends at 65504" in problem.detail
    assert not (tmp_path / "half" / WEIGHTS).exists()
    convert(tmp_path / "large", tmp_path / "wide", dtype="float32")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[1, 3, 5] = 1
    model.save_pretrained(tmp_path / "infinite")
    convert(tmp_path / "infinite", tmp_path / "half", dtype="float16")
    assert sum(int(tensor.isinf().sum()) for tensor in stored(tmp_path / "half").values()) == 1


def test_auto_dtype_keeps_stored_dtype(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "half", dtype="bfloat16")
    convert(tmp_path / "half", tmp_path / "again")
    assert_same(stored(tmp_path / "again"), stored(tmp_path / "half"))
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "half" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_dtype_keeps_dtype_of_each_tensor(dtype: str, mixtral_checkpoint: Path, tmp_path: Path) -> None:
    """Routers and norms in fp32, in a checkpoint whose configuration names another dtype than most tensors have."""
    tensors = {
        name: tensor if "norm" in name or name.endswith("gate.weight") else tensor.bfloat16()
        for name, tensor in stored(mixtral_checkpoint).items()
    }
    shutil.copytree(mixtral_checkpoint, tmp_path / "mixed", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, tmp_path / "mixed" / WEIGHTS, metadata={"format": "pt"})
    edit_config(tmp_path / "mixed", dtype=dtype)
    words = convert(tmp_path / "mixed", tmp_path / "out", max_shard_size="200KB")
    assert_same(stored(tmp_path / "out"), tensors)
    assert words.endswith("bfloat16 and float32")


def test_convert_to_other_shard_sizes(shards: Path, tmp_path: Path) -> None:
    convert(shards, tmp_path / "one")
    assert files_of(tmp_path / "one") == {"config.json", "generation_config.json", WEIGHTS}  # no index
    convert(tmp_path / "one", tmp_path / "several", max_shard_size="2MB")
    assert weight_map(tmp_path / "several").keys() == stored(shards).keys()
    assert INDEX in files_of(tmp_path / "several")
    assert_same(stored(tmp_path / "one"), stored(shards))
    assert_same(stored(tmp_path / "several"), stored(shards))


def test_experts_keep_hub_layout(mixtral_checkpoint: Path, tmp_path: Path) -> None:
    convert(mixtral_checkpoint, tmp_path / "out", dtype="bfloat16")
    assert_same(
        stored(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in stored(mixtral_checkpoint).items()}
    )
    assert HFMixtral.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_convert_sequence_classifier(tmp_path: Path, llama_config: LlamaConfig) -> None:
    new_model(llama_config, "ForSequenceClassification").save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(model.score.weight, stored(tmp_path / "in")["score.weight"].bfloat16())


@pytest.mark.usefixtures("no_persimmon")
def test_convert_unregistered_architecture(tmp_path: Path) -> None:
    reference = new_model(tiny_config(PersimmonConfig))
    reference.save_pretrained(tmp_path / "in")
    with pytest.warns(UserWarning, match="PersimmonForCausalLM is not registered"):
        convert(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in reference.state_dict().items()}
    assert_same(stored(tmp_path / "out"), expected)


def test_other_files_are_copied_except_old_weights(full: Path, tmp_path: Path) -> None:
    before = {name: (full / name).read_bytes() for name in files_of(full)}
    convert(full, tmp_path / "out")
    assert files_of(tmp_path / "out") == {"config.json", "generation_config.json", WEIGHTS, *OTHERS}
    for name, content in OTHERS.items():
        assert (tmp_path / "out" / name).read_text() == content
    assert {name: (full / name).read_bytes() for name in files_of(full)} == before
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_hub_repository_is_converted_like_its_directory(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizer.model", "merges.txt", "vocab.txt"):
        (full / name).write_text("{}")
    snapshot = tmp_path / "snapshot"

    def download(_: str, *, allow_patterns: list[str], ignore_patterns: list[str], **options: Any) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for name in filter_repo_objects(sorted(files_of(full)), **patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(full / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr("nrl_models.common.checkpoint.resolve_folder.snapshot_download", download)
    read = file_hashes(resolve_folder("owner/name"))
    assert read == file_hashes(full)
    assert "chat_template.jinja" in read
    assert not files_of(snapshot) & {"LICENSE", "assets/logo/small.png", *OLD_WEIGHTS[:1], *OLD_WEIGHTS[2:-1]}
    convert("owner/name", tmp_path / "out")
    convert(full, tmp_path / "expected")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == OTHERS["chat_template.jinja"]
    assert not files_of(snapshot) & {"pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx"}


def test_overwrite_replaces_earlier_conversion(full: Path, tmp_path: Path) -> None:
    convert(full, tmp_path / "out", dtype="bfloat16", max_shard_size="1MB")
    (full / "tokenizer.json").write_text('{"newer": true}')
    (full / "assets" / "logo" / "small.png").write_text("larger")
    convert(full, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"newer": true}'
    assert (tmp_path / "out" / "assets" / "logo" / "small.png").read_text() == "larger"
    assert files_of(tmp_path / "out") == {"config.json", "generation_config.json", WEIGHTS, *OTHERS}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("inside", ["out", "converted/deep/out"])
def test_target_inside_source_folder(inside: str, full: Path) -> None:
    for overwrite in (False, True):
        convert(full, full / inside, overwrite=overwrite)
        assert files_of(full / inside) == {"config.json", "generation_config.json", WEIGHTS, *OTHERS}


def test_symlinks_inside_source_are_followed(full: Path, tmp_path: Path) -> None:
    (full / "copy.json").symlink_to("tokenizer.json")
    (full / "chain.json").symlink_to("copy.json")
    (full / "absolute.json").symlink_to(full.absolute() / "tokenizer.json")
    (full / "assets" / "up").symlink_to("../LICENSE")
    (full / "pictures").symlink_to("assets/logo")
    (full / "old.bin").symlink_to("/etc/passwd")  # not copied
    convert(full, tmp_path / "out")
    out = tmp_path / "out"
    added = {"copy.json", "chain.json", "absolute.json", "assets/up", "pictures/small.png"}
    assert files_of(out) == {"config.json", "generation_config.json", WEIGHTS, *OTHERS, *added}
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert (out / "chain.json").read_text() == "{}"
    assert (out / "pictures" / "small.png").read_text() == "picture"


def test_symlinks_leaving_source_all_raise(full: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (outside / "back").symlink_to(full / "LICENSE")
    (full / "file.txt").symlink_to(outside / "secret.txt")
    (full / "relative.txt").symlink_to("../outside/secret.txt")
    (full / "chain.txt").symlink_to("file.txt")
    (full / "folder").symlink_to(outside)
    (full / "assets" / "deep").symlink_to(outside / "secret.txt")
    (full / "beside").symlink_to(tmp_path / (full.name + "-beside"))
    (tmp_path / (full.name + "-beside")).mkdir()
    (full / "nowhere").symlink_to("gone")
    (full / "circle").symlink_to("circle")
    (full / "assets" / "home").symlink_to("..")
    os.mkfifo(full / "pipe")
    (full / "there-and-back").symlink_to(outside / "back")  # points to a file inside, through another folder
    with pytest.raises(CheckpointError) as caught:
        convert(full, tmp_path / "out")
    invalid = {"file.txt", "relative.txt", "chain.txt", "folder", "assets/deep", "beside", "nowhere", "circle"}
    assert problems(caught.value) == {("file", name) for name in invalid | {"assets/home", "pipe"}}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("blobs", ["same repository", "other directory"])
def test_convert_hub_cache_snapshot(full: Path, tmp_path: Path, blobs: str) -> None:
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    full.rename(snapshot)
    (tmp_path / "elsewhere").mkdir()
    if blobs == "other directory":
        (repository / "blobs").symlink_to(tmp_path / "elsewhere")
    else:
        (repository / "blobs").mkdir()
    for number, name in enumerate(sorted(files_of(snapshot))):
        (snapshot / name).rename(repository / "blobs" / str(number))
        (snapshot / name).symlink_to(repository / "blobs" / str(number))
    if blobs == "other directory":
        with pytest.raises(CheckpointError, match="leaves the directory"):
            convert(snapshot, tmp_path / "out")
        return
    convert(snapshot, tmp_path / "out")
    assert files_of(tmp_path / "out") == {"config.json", "generation_config.json", WEIGHTS, *OTHERS}


def test_copy_of_read_only_folder_is_writable(full: Path, tmp_path: Path) -> None:
    full.chmod(0o555)
    try:
        convert(full, tmp_path / "out")
    finally:
        full.chmod(0o755)
    assert (tmp_path / "out").stat().st_mode & 0o200


@pytest.mark.parametrize("way", ["same path", "symlink", "other spelling"])
def test_converting_in_place_raises(way: str, folder: Path, tmp_path: Path) -> None:
    target = {"same path": folder, "other spelling": folder / ".." / folder.name}.get(way, tmp_path / "link")
    if way == "symlink":
        target.symlink_to(folder)
    before = stored(folder)
    with pytest.raises(CheckpointError, match="cannot be written in place") as caught:
        convert(folder, target, dtype="bfloat16")
    assert problems(caught.value) == {("file", str(target))}
    assert_same(stored(folder), before)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", ""])
def test_unsupported_dtype_raises(dtype: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownArgumentError, match="expected 'auto', bfloat16"):
        convert(folder, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "kind"), [({"num_hidden_layers": 3}, "missing"), ({"num_hidden_layers": 1}, "unexpected")]
)
def test_invalid_checkpoint_is_not_converted(values: dict[str, Any], kind: str, folder: Path, tmp_path: Path) -> None:
    edit_config(folder, **values)
    with pytest.raises(CheckpointError) as caught:
        convert(folder, tmp_path / "out")
    assert {problem_kind for problem_kind, _ in problems(caught.value)} == {kind}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "LlamaForQuestionAnswering", "T5EncoderModel", "T5ForConditionalGeneration"]
)
def test_architecture_without_auto_class_raises(name: str, tmp_path: Path) -> None:
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class, None, model_class)
    model_class(config).save_pretrained(tmp_path / "source")
    with pytest.raises(UnknownArchitectureError, match=rf"is a {name}, which cannot be converted.*\w+Model can be"):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
