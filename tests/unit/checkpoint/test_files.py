"""Reading the files of a checkpoint, and the errors for damaged ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import INDEX, WEIGHTS, edit_index, new_model, problems, stored, weight_map
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from nrl_models import CheckpointError
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.page_maps import map_file
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.checkpoint.stored_tensors import DTYPES as KNOWN_DTYPES
from nrl_models.testing.tiny import tiny_config


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def require_checkpoint_error(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles(folder)
    assert str(folder) in str(caught.value)
    return caught.value


# Reading


@pytest.mark.parametrize("name", ["llama_checkpoint", "llama_shards"])
def test_read_all_tensors(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    files, expected = CheckpointFiles(folder), stored(folder)
    assert files.tensors.keys() == expected.keys()
    for key, tensor in files.tensors.items():
        assert (tensor.shape, tensor.dtype) == (tuple(expected[key].shape), expected[key].dtype)
        assert torch.equal(files.read(tensor), expected[key])
        assert key in load_file(folder / tensor.file)
    assert files.nbytes == sum(tensor.nbytes for tensor in expected.values())
    files.close()


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_match_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(48, dtype=torch.uint8) if dtype is not torch.bool else torch.arange(48).remainder(2).bool()
    save_file({"a": raw.view(dtype), "b": raw.clone().view(dtype).view(2, -1)}, tmp_path / WEIGHTS)
    files, expected = CheckpointFiles(tmp_path), load_file(tmp_path / WEIGHTS)
    for key, tensor in files.tensors.items():
        value = files.read(tensor)
        assert value.dtype == expected[key].dtype == dtype
        assert torch.equal(value.view(torch.uint8), expected[key].view(torch.uint8))


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    tensors = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(5.0)}
    save_file(tensors, tmp_path / WEIGHTS)
    files = CheckpointFiles(tmp_path)
    for key, tensor in tensors.items():
        assert torch.equal(files.read(files.tensors[key]), tensor)
    empty = files.tensors["empty"]
    assert files.read_joined([empty, empty], (0, 3)) is None


def test_read_joined_concatenates_tensors(llama_checkpoint: Path) -> None:
    files, expected = CheckpointFiles(llama_checkpoint), stored(llama_checkpoint)
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    joined = files.read_joined([files.tensors[name] for name in names], (768, 256))
    assert torch.equal(joined, torch.cat([expected[name] for name in names]))


def test_tensors_outlive_closed_files(llama_checkpoint: Path) -> None:
    files = CheckpointFiles(llama_checkpoint)
    tensor = files.tensors["model.embed_tokens.weight"]
    value, joined = files.read(tensor), files.read_joined([tensor], tensor.shape)
    files.close()
    for written in (value, joined):
        assert torch.equal(written, stored(llama_checkpoint)[tensor.key])


def test_writes_to_tensors_do_not_change_file(folder: Path) -> None:
    before = (folder / WEIGHTS).read_bytes()
    files = CheckpointFiles(folder)
    for tensor in files.tensors.values():
        files.read(tensor).zero_()
    assert (folder / WEIGHTS).read_bytes() == before


def test_concurrent_reads_map_file_once(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, mapped = [], []

    def noted_open(path: Any, *args: Any) -> int:
        opened.append(path)
        return os_open(path, *args)

    def slow_map(descriptor: int) -> Any:
        mapped.append(descriptor)
        time.sleep(0.02)
        return map_file(descriptor)

    os_open = os.open
    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr("nrl_models.common.checkpoint.files.map_file", slow_map)
    files = CheckpointFiles(llama_checkpoint)
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(files.read, files.tensors.values()))
    assert opened == [llama_checkpoint / WEIGHTS]
    assert len(mapped) == len(files._maps) == 1
    for key, value in zip(files.tensors, values, strict=True):
        assert torch.equal(value, stored(llama_checkpoint)[key])


def write_by_hand(path: Path, tensors: dict[str, torch.Tensor], padding: int = 0, **header: Any) -> None:
    """Write a safetensors file with any header, including headers that `save_file` does not write."""
    position, data = 0, b""
    for key, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [position, position + len(raw)]}
        position, data = position + len(raw), data + raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("padding", [0, 2])
def test_unaligned_tensors_are_not_mapped(tmp_path: Path, padding: int) -> None:
    tensors = {"a": torch.randn(64, 64), "b": torch.randn(64, 64)}
    write_by_hand(tmp_path / WEIGHTS, tensors, padding)
    files = CheckpointFiles(tmp_path)
    for key, tensor in tensors.items():
        assert torch.equal(files.read(files.tensors[key]), tensor)
    joined = files.read_joined(list(files.tensors.values()), (128, 64))
    if padding:
        assert joined is None
    else:
        assert joined.data_ptr() % 4 == 0
        assert torch.equal(joined, torch.cat(list(tensors.values())))


def test_single_file_next_to_index(shards: Path) -> None:
    """transformers reads the single file, which is correct if the shards are equal or missing."""
    tensors = stored(shards)
    name = next(iter(tensors))
    save_file(tensors, shards / WEIGHTS)
    with closing(CheckpointFiles(shards)) as single:
        assert {tensor.file for tensor in single.tensors.values()} == {WEIGHTS}
    for other in ({**tensors, name: tensors[name] + 1}, {"a": torch.ones(1)}):
        save_file(other, shards / WEIGHTS)
        error = require_checkpoint_error(shards)
        assert {kind for kind, _ in problems(error)} == {"duplicated"}
        assert f"remove {WEIGHTS}, or {INDEX} and its shards" in str(error)
    for shard in shards.glob("model-*.safetensors"):
        shard.unlink()
    assert list(CheckpointFiles(shards).tensors) == ["a"]


# Damage


def test_empty_folder_raises(tmp_path: Path) -> None:
    error = require_checkpoint_error(tmp_path)
    assert problems(error) == {("file", str(tmp_path))}
    assert f"neither {WEIGHTS} nor {INDEX}" in str(error)


COMMAND = re.compile(r'python -c ".*')


@pytest.mark.parametrize(
    ("name", "architectures"),
    [
        ("model.pt", ["LlamaForCausalLM"]),  # transformers does not read it
        ("consolidated.00.pth", ["LlamaForCausalLM"]),
        ("pytorch_model.bin", ["OwnForCausalLM"]),  # no class of transformers
        ("pytorch_model.bin", ["AutoModel"]),
        ("pytorch_model.bin", [5]),
        ("pytorch_model.bin", None),
    ],
)
def test_other_weight_formats_raise(tmp_path: Path, name: str, architectures: Any) -> None:
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    error = require_checkpoint_error(tmp_path)
    assert problems(error) == {("format", str(tmp_path))}
    assert f"only {name} found" in str(error)
    assert "with the class that saved it" in str(error)
    assert COMMAND.search(str(error)) is None


@pytest.mark.long
@pytest.mark.parametrize("index", [None, INDEX])
def test_conversion_command_keeps_head(tmp_path: Path, index: str | None) -> None:
    reward = new_model(tiny_config(LlamaConfig), "ForSequenceClassification")
    folder = tmp_path / "it's $HOME"
    reward.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    if index is not None:
        content = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model.bin")}
        (folder / index).write_text(json.dumps(content))
    command = COMMAND.search(str(require_checkpoint_error(folder)))
    assert command is not None
    arguments = shlex.split(command.group())
    subprocess.run([sys.executable, *arguments[1:]], check=True, capture_output=True)
    for key, tensor in load_file(tmp_path / "it's $HOME-safetensors" / WEIGHTS).items():
        assert torch.equal(tensor, tensors.pop(key))
    assert not tensors


@pytest.mark.parametrize("subfolder", ["", "part"])
def test_hub_repo_with_only_pickles_raises(subfolder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers converts a repository by its name."""
    module = "nrl_models.common.checkpoint.resolve_folder"
    (tmp_path / subfolder).mkdir(exist_ok=True)
    (tmp_path / subfolder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    files = [f"{subfolder}/pytorch_model.bin".strip("/"), "other/model.pt", "config.json"]
    monkeypatch.setattr(f"{module}.snapshot_download", lambda *_, **options: str(tmp_path))
    monkeypatch.setattr(f"{module}.list_repo_files", lambda *_, **options: files)
    error = require_checkpoint_error(resolve_folder("owner/name", subfolder=subfolder))
    assert "only pytorch_model.bin found, and only safetensors are read" in str(error)
    command = COMMAND.search(str(error))
    if subfolder:
        assert command is None
        assert "with the class that saved it" in str(error)
    else:
        assert command is not None
        assert shlex.split(command.group())[3:] == ["owner/name", "name-safetensors"]


@pytest.mark.parametrize("cut", [1, 1000, 0.5, 0.99999])
def test_truncated_file_raises(folder: Path, cut: float) -> None:
    path = folder / WEIGHTS
    content = path.read_bytes()
    kept = content[: cut if isinstance(cut, int) else int(len(content) * cut)]
    path.write_bytes(kept)
    error = require_checkpoint_error(folder)
    assert problems(error) == {("file", WEIGHTS)}
    assert f"damaged or cut off ({len(kept)} bytes on disk)" in str(error)
    assert "download or save the checkpoint again" in str(error)


def corrupted_headers() -> dict[str, bytes]:
    def file(header: bytes, data: bytes = b"\0" * 16) -> bytes:
        return struct.pack("<Q", len(header)) + header + data

    def entry(**values: Any) -> bytes:
        return json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | values}).encode()

    return {
        "empty file": b"",
        "invalid JSON": file(b"{not json" + b" " * 7),
        "JSON list": file(b"[1, 2]  "),
        "longer than the file": struct.pack("<Q", 2**40) + entry() + b"\0" * 16,
        "unknown dtype": file(entry(dtype="F13")),
        "mismatched shape and size": file(entry(shape=[5])),
        "outside the file": file(entry(data_offsets=[16, 32])),
        "negative offset": file(entry(data_offsets=[-16, 0])),
        "random bytes": bytes(range(256)),
        "HTML": b"<!DOCTYPE html><html><body>Not found</body></html>",
        "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n",
    }


@pytest.mark.parametrize("content", corrupted_headers().values(), ids=corrupted_headers())
def test_corrupt_header_raises(tmp_path: Path, content: bytes) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    error = require_checkpoint_error(tmp_path)
    assert problems(error) == {("file", WEIGHTS)}


def test_unsupported_dtype_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)}, tmp_path / WEIGHTS)
    monkeypatch.delitem(KNOWN_DTYPES, "F64")
    error = require_checkpoint_error(tmp_path)
    assert problems(error) == {("dtype", "a")}
    assert "has dtype F64; readable are BOOL, U8" in str(error)


# Indexes


def test_missing_shard_raises(shards: Path) -> None:
    shard = first_shard(shards)
    count = sum(file == shard.name for file in weight_map(shards).values())
    shard.unlink()
    error = require_checkpoint_error(shards)
    assert problems(error) == {("file", shard.name)}
    assert f"is missing; it should hold {count} tensors" in str(error)


def test_truncated_shard_raises(shards: Path) -> None:
    shard = first_shard(shards)
    shard.write_bytes(shard.read_bytes()[:-4])
    assert problems(require_checkpoint_error(shards)) == {("file", shard.name)}


def test_index_with_wrong_shard_raises(shards: Path) -> None:
    key, file = next(iter(weight_map(shards).items()))
    other = next(tensor for tensor in weight_map(shards).values() if tensor != file)
    edit_index(shards, lambda entries: entries.update({key: other}))
    error = require_checkpoint_error(shards)
    assert problems(error) == {("index", key)}
    assert f"({other}): is not in {other}, although {INDEX} lists it there" in str(error)
    assert "do not trust this directory" in str(error)


def test_index_with_missing_tensor_raises(shards: Path) -> None:
    edit_index(shards, lambda entries: entries.update({"ghost.weight": first_shard(shards).name}))
    assert problems(require_checkpoint_error(shards)) == {("index", "ghost.weight")}


def test_tensor_in_two_shards_raises(shards: Path) -> None:
    first, second = sorted(shards.glob("model-*.safetensors"))[:2]
    key, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {key: tensor}, second, metadata={"format": "pt"})
    error = require_checkpoint_error(shards)
    assert problems(error) == {("duplicated", key)}
    assert first.name in str(error)
    assert second.name in str(error)


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd.safetensors", "../outside.safetensors", "sub/../../outside.safetensors", "..\\outside.safetensors"],
)
def test_index_path_outside_folder_raises(shards: Path, path: str) -> None:
    outside, shard = shards.parent / "outside.safetensors", first_shard(shards)
    key, tensor = load_file(shard).popitem()
    save_file({key: tensor}, outside)
    shutil.copy(outside, shards / "..\\outside.safetensors")
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != key}, shard)
    (shards / "sub").mkdir()
    edit_index(shards, lambda entries: entries.update({key: path}))
    error = require_checkpoint_error(shards)
    assert problems(error) == {("index", key)}
    assert f"points to {path!r}, outside the checkpoint" in str(error)


def test_index_with_subfolder_paths(shards: Path) -> None:
    shard = first_shard(shards)
    (shards / "below").mkdir()
    shard.rename(shards / "below" / shard.name)

    def move(entries: dict[str, str]) -> None:
        for key, file in entries.items():
            if file == shard.name:
                entries[key] = f"below/{file}"

    edit_index(shards, move)
    assert CheckpointFiles(shards).tensors.keys() == weight_map(shards).keys()


@pytest.mark.parametrize("file", ["pytorch_model-00001-of-00002.bin", "a.SAFETENSORS", "", 7, None])
def test_index_with_non_safetensors_file_raises(shards: Path, file: Any) -> None:
    key = next(iter(weight_map(shards)))
    edit_index(shards, lambda entries: entries.update({key: file}))
    error = require_checkpoint_error(shards)
    assert problems(error) == {("format", key)}
    assert ("import LlamaForCausalLM" in str(error)) == str(file).endswith(".bin")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"metadata": {}}',
        '{"weight_map": 3}',
        '{"weight_map": ["a"]}',
        '{"weight_map": null}',
        "\xff\xfe",
    ],
)
def test_invalid_index_raises(shards: Path, content: str) -> None:
    (shards / INDEX).write_bytes(content.encode("latin-1"))
    error = require_checkpoint_error(shards)
    assert problems(error) == {("index", INDEX)}
    assert "is not an index with a weight_map" in str(error) or "is not a JSON object" in str(error)


def test_error_lists_all_problems(shards: Path) -> None:
    missing, cut, *rest = sorted(shards.glob("model-*.safetensors"))
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:100])
    keys = [key for key, file in weight_map(shards).items() if file == rest[0].name]
    edit_index(shards, lambda entries: entries.update({keys[0]: "../a.safetensors", "ghost": rest[0].name}))
    error = require_checkpoint_error(shards)
    assert problems(error) == {
        ("file", missing.name),
        ("file", cut.name),
        ("index", keys[0]),
        ("index", "ghost"),
    }


# Locating a checkpoint


def test_resolve_local_folder(llama_checkpoint: Path) -> None:
    assert resolve_folder(llama_checkpoint) == resolve_folder(str(llama_checkpoint)) == llama_checkpoint


def test_resolve_subfolder(llama_checkpoint: Path) -> None:
    assert resolve_folder(llama_checkpoint.parent, subfolder=llama_checkpoint.name) == llama_checkpoint


def test_folder_without_config_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s){tmp_path} .*config\.json: is missing"):
        resolve_folder(tmp_path)
    (tmp_path / "config.json").symlink_to("../../blobs/0123")
    with pytest.raises(CheckpointError, match=r"config\.json: is a link to \.\./\.\./blobs/0123, which is not a file"):
        resolve_folder(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "no name!", "~/nowhere"])
def test_missing_local_path_raises(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory") as caught:
        resolve_folder(name, cache_dir=tmp_path)
    assert name in str(caught.value)


def test_file_path_raises(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file, expected a directory"):
        resolve_folder(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["some/hub-repository", "name"])
def test_hub_repo_offline_raises(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"check the path; for a hub repository check its name, your token"
    ) as caught:
        resolve_folder(name, cache_dir=tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize(("name", "similar"), [("ckptt", "./ckpt"), ("q9.gguf", "./q8.gguf"), ("org/ckptt", None)])
def test_hub_error_suggests_local_path(
    name: str, similar: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "q8.gguf").touch()
    with pytest.raises(CheckpointError, match="cannot be fetched as a hub repository") as caught:
        resolve_folder(name, cache_dir=tmp_path / "cache")
    assert ("did you mean" in str(caught.value)) == (similar is not None)
    assert similar is None or f"{name}: is not a directory (did you mean {similar}?)" in str(caught.value)


def test_snapshot_download_patterns(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download_options: dict[str, Any] = {}
    texts = ("*.codes", "*.jinja", "*.json", "*.model", "*.py", "*.spm", "*.tiktoken", "*.txt", "*.vocab")

    def download(repository: str, **options: Any) -> str:
        download_options.update(options, repository=repository)
        return str(llama_checkpoint.parent)

    monkeypatch.setattr("nrl_models.common.checkpoint.resolve_folder.snapshot_download", download)
    resolved = resolve_folder("a/b", subfolder=llama_checkpoint.name, revision="r", token="t", cache_dir="c")
    assert resolved == llama_checkpoint
    assert download_options == {
        "repository": "a/b",
        "revision": "r",
        "token": "t",
        "cache_dir": "c",
        "local_files_only": False,
        "allow_patterns": [f"{llama_checkpoint.name}/{end}" for end in (*texts, "model*.safetensors")],
        "ignore_patterns": ["*.nrl-published/*"],
    }


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("subfolder", ["", "part"])
def test_shards_with_other_names_are_downloaded(
    subfolder: str, variant: str | None, monkeypatch: pytest.MonkeyPatch, llama_shards: Path, tmp_path: Path
) -> None:
    """Some repositories name their shards `layers-1.safetensors`, `outside.safetensors` and `mtp.safetensors`."""
    repository, downloaded = tmp_path / "repository", tmp_path / "downloaded"
    folder = shutil.copytree(llama_shards, repository / subfolder)
    renamed = {name: name.replace("model-", "layers[1]-") for name in weight_map(folder).values()}
    edit_index(folder, lambda entries: entries.update({key: renamed[name] for key, name in entries.items()}))
    for name, new_name in renamed.items():
        (folder / name).rename(folder / new_name)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    if variant is not None:
        (folder / INDEX).rename(folder / f"model.safetensors.index.{variant}.json")

    def download(_: str, *, allow_patterns: list[str], **options: Any) -> str:
        for path in filter(Path.is_file, repository.rglob("*")):
            name = path.relative_to(repository)
            if any(fnmatch(str(name), pattern) for pattern in allow_patterns):
                (downloaded / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, downloaded / name)
        return str(downloaded)

    monkeypatch.setattr("nrl_models.common.checkpoint.resolve_folder.snapshot_download", download)
    with closing(CheckpointFiles(resolve_folder("owner/name", subfolder=subfolder), variant)) as checkpoint:
        assert checkpoint.tensors.keys() == weight_map(llama_shards).keys()
    assert not (downloaded / subfolder / "consolidated.safetensors").exists()
