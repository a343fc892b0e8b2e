"""Pickles and files outside the checkpoint raise CheckpointError before transformers opens them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as HFAutoModelForCausalLM
from transformers import BitsAndBytesConfig

from nrl_models import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    check_parity,
    start_engine,
)
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.trust import adapter_files
from nrl_models.common.trust.adapter_files import require_safe_adapter
from nrl_models.engines.vllm.vllm_lora import load_adapter as load_adapter_into_vllm
from nrl_models.errors import CheckpointError, NRLModelsError, UnknownArgumentError
from nrl_models.onboarding.convert import convert
from nrl_models.testing.suite.asserts import assert_same_tensors


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def load_quantized(folder: Path) -> Any:
    """Load with a quantization method that transformers loads."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": "int8_weight_only"}}
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(folder)


LOADS: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
    "quantized": load_quantized,
    "hf-generate": lambda folder: start_engine("hf-generate", folder),
    "parity": check_parity,
}


@pytest.fixture
def checkpoint(llama_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_checkpoint, tmp_path / "checkpoint"))


def set_weights_in_config(checkpoint: Path, file: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"transformers_weights": file}))


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("file", ["payload.bin", "../payload.bin", "../payload.safetensors"])
def test_index_naming_pickle_raises(file: str, load: Callable[[Path], Any], checkpoint: Path, tmp_path: Path) -> None:
    keys = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(Payload(tmp_path / "ran"), checkpoint / file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, file)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="payload"):
        load(checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("file", ["a\0.safetensors", "\ud800.safetensors"], ids=ascii)
@pytest.mark.parametrize("place", ["index", "config"])
def test_invalid_file_names_raise(place: str, file: str, load: Callable[[Path], Any], checkpoint: Path) -> None:
    if place == "config":
        set_weights_in_config(checkpoint, file)
    else:
        keys = load_file(checkpoint / "model.safetensors")
        (checkpoint / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(keys, file)}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not the name of a file") as raised:
        load(checkpoint)
    assert str(raised.value).encode()


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize(
    "file", ["adapter_model.bin", "../other.safetensors", "/other.safetensors", "absent.safetensors", ["a"]]
)
def test_unsafe_transformers_weights_raise(
    file: Any, load: Callable[[Path], Any], checkpoint: Path, tmp_path: Path
) -> None:
    torch.save(Payload(tmp_path / "ran"), checkpoint / "adapter_model.bin")
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "other.safetensors")
    set_weights_in_config(checkpoint, file)
    with pytest.raises(CheckpointError, match=r"transformers_weights|absent\.safetensors: is missing"):
        load(checkpoint)
    assert not (tmp_path / "ran").exists()


def saved_in_place(folder: Path) -> torch.Tensor:
    """Save a changed model over its own checkpoint. Returns the weight that transformers then loads, changed back."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(folder)
    return HFAutoModelForCausalLM.from_pretrained(folder).model.norm.weight / 2


def converted(folder: Path) -> torch.Tensor:
    convert(folder, folder.parent / "converted")
    return load_file(folder.parent / "converted" / "model.safetensors")["model.norm.weight"]


def quantized_on_load(folder: Path) -> torch.Tensor:
    pytest.importorskip("bitsandbytes")
    options = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.float32)
    return model.model.norm.weight


NORMS: dict[str, Callable[[Path], torch.Tensor]] = {
    "base model": lambda folder: AutoModel.from_pretrained(folder).norm.weight,
    "reward model": lambda folder: (
        AutoModelForSequenceClassification.from_pretrained(folder, new_head=True, num_labels=1).model.norm.weight
    ),
    "convert": converted,
    "saved in place": saved_in_place,
    "quantized on load": quantized_on_load,
}
"""Loads of a checkpoint that return the weight of its last norm."""


@pytest.mark.parametrize(
    "norm",
    [pytest.param(norm, marks=pytest.mark.integrations if "quantized" in name else ()) for name, norm in NORMS.items()],
    ids=NORMS,
)
def test_named_weights_are_those_of_every_load(norm: Callable[[Path], torch.Tensor], checkpoint: Path) -> None:
    tensors = {key: tensor + 1 for key, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(tensors, checkpoint / "other.safetensors", {"format": "pt"})
    set_weights_in_config(checkpoint, "other.safetensors")
    assert torch.equal(norm(checkpoint).detach(), tensors["model.norm.weight"])


@pytest.mark.parametrize("engine", ["vllm", "vllm-transformers", "mlx"])
def test_engine_that_ignores_named_weights_raises(engine: str, checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "other.safetensors")
    set_weights_in_config(checkpoint, "other.safetensors")
    with pytest.raises(CheckpointError, match=r"transformers_weights .* is 'other\.safetensors'[\s\S]*convert"):
        start_engine(engine, checkpoint)


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "model-00001-of-00002.safetensors"])
def test_mlx_raises_for_further_weights(name: str, checkpoint: Path) -> None:
    """mlx-lm reads all files called `model*.safetensors`. The order decides which of two equal names counts."""
    shutil.copy(checkpoint / "model.safetensors", checkpoint / name)
    AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(CheckpointError, match=rf"{name}: is not part of the checkpoint, and mlx-lm reads it"):
        start_engine("mlx", checkpoint)


def load_vllm_adapter(folder: Path) -> Any:
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(lora_config=True)))
    return load_adapter_into_vllm(llm, folder, 1)


@pytest.mark.parametrize("reader", ["transformers", "vllm"])
@pytest.mark.parametrize("file", ["adapter_model.bin", "adapter_model.pt", "link"])
def test_adapter_pickles_and_symlinks_raise(reader: str, file: str, llama_checkpoint: Path, tmp_path: Path) -> None:
    """transformers and vLLM read a pickle if an adapter has no safetensors."""
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    read = model.load_adapter if reader == "transformers" else load_vllm_adapter
    folder = tmp_path / "adapter"
    get_peft_model(AutoModelForCausalLM.from_pretrained(llama_checkpoint), LoraConfig()).save_pretrained(folder)
    weights = folder / "adapter_model.safetensors"
    if file == "link":
        weights.rename(tmp_path / "elsewhere.safetensors")
        weights.symlink_to(tmp_path / "elsewhere.safetensors")
    else:
        weights.unlink()
        torch.save(Payload(tmp_path / "ran"), folder / file)
    with pytest.raises(NRLModelsError, match=rf"only {file} found|link that leads out of the checkpoint"):
        read(folder)
    assert not (tmp_path / "ran").exists()


def test_load_adapter_arguments_cannot_load_pickles(llama_checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    folder = tmp_path / "adapter"
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(llama_checkpoint), LoraConfig())
    adapter.save_pretrained(folder)
    torch.save(Payload(tmp_path / "ran"), folder / "adapter_model.bin")
    with pytest.raises(UnknownArgumentError, match="use_safetensors=False: requests pickled weights"):
        model.load_adapter(str(folder), use_safetensors=False)
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: model.load_adapter(str(tmp_path), adapter_kwargs={"subfolder": "adapter"}),
        lambda: model.load_adapter(pretrained_model_name_or_path=str(folder)),
        lambda: model.load_adapter(str(folder), peft_config=adapter.peft_config["default"]),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match=r"only adapter_model\.bin found"):
            call()
    require_safe_adapter({"peft_model_id": str(folder), "adapter_state_dict": tensors})  # reads no weights from files
    assert not (tmp_path / "ran").exists()


def test_load_adapter_of_wrong_path_raises_without_retries(
    llama_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    (tmp_path / "adapter").mkdir()
    monkeypatch.chdir(tmp_path)
    fetched: list[str] = []

    def fetch(name: str, file: str, **options: Any) -> str:
        fetched.append(name)
        raise OSError("no network")

    monkeypatch.setattr(adapter_files, "hf_hub_download", fetch)
    with pytest.raises(CheckpointError, match=r"no such directory \(did you mean adapter\?\)"):
        model.load_adapter("./adaptr")
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        model.load_adapter("adapter", adapter_kwargs={"subfolder": "nowhere"})
    assert not fetched
    with pytest.raises(
        CheckpointError, match=r"is not a directory \(did you mean ./adapter\?\), and no .*: no network"
    ):
        model.load_adapter("adaptr")
    assert fetched == ["adaptr"]


def test_load_adapter_of_hub_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()  # a local directory does not hide the owner's repositories
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(adapter_files, "hf_hub_download", lambda name, file, **options: calls.append((name, options)))
    require_safe_adapter({"peft_model_id": "owner/name", "adapter_kwargs": {"revision": "v1"}})
    require_safe_adapter({"peft_model_id": "name", "local_files_only": True, "kwargs": {"token": "x"}})
    require_safe_adapter({"peft_model_id": "name", "peft_config": {}})
    assert calls == [("owner/name", {"revision": "v1"}), ("name", {"token": "x", "local_files_only": True})]


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_transformers_weights_in_config_are_loaded(sharded: bool, checkpoint: Path, tmp_path: Path) -> None:
    tensors = {key: tensor + 1 for key, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(tensors, checkpoint / "other.safetensors", {"format": "pt"})
    named = "other.safetensors"
    if sharded:
        named = "other.safetensors.index.json"
        (checkpoint / named).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "other.safetensors")})
        )
    set_weights_in_config(checkpoint, named)
    theirs = HFAutoModelForCausalLM.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert_same_tensors(model.state_dict(), theirs.state_dict())
    assert check_parity(checkpoint).passed
    with start_engine("hf-generate", checkpoint) as engine:
        assert_same_tensors(engine.model.state_dict(), theirs.state_dict())
    assert CheckpointFiles(checkpoint).tensors.keys() == tensors.keys()
    model.save_pretrained(tmp_path / "saved")
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), theirs.state_dict())
