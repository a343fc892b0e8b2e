"""Code in a checkpoint, or named by it, does not run without permission: hub kernels and pickles."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, assert_same, edit_config
from recipe_inputs import gemma4_processor
from transformers import BitsAndBytesConfig, DacConfig, DacModel, PreTrainedModel
from transformers.integrations import hub_kernels
from versions import since

from nrl_models import AutoModel, AutoModelForCausalLM, CheckpointError, registry
from nrl_models.engines import start_engine
from nrl_models.errors import RemoteCodeError
from nrl_models.inputs.processors import load_processor
from nrl_models.loading.read_config import read_config
from nrl_models.testing.case import FamilyCase

KERNELS: dict[str, dict[str, Any]] = {
    "attn_implementation": {"attn_implementation": "someone/kernel"},
    "verified organization": {"attn_implementation": "kernels-community/flash-attn2"},
    "revision and function": {"attn_implementation": "someone/kernel@v1:run"},
    "paged": {"attn_implementation": "paged|someone/kernel"},
    "attn_implementation per part": {"attn_implementation": {"": "sdpa", "text_config": "someone/kernel"}},
    "_attn_implementation": {"_attn_implementation": "someone/kernel"},
    "experts_implementation": {"experts_implementation": "someone/kernel"},
    "text_config": {"text_config": {"attn_implementation": "someone/kernel"}},
    "list of configs": {"parts": [{"attn_implementation": "someone/kernel"}]},
}


@pytest.fixture
def fetched_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the repositories from which transformers would fetch kernels."""
    repositories: list[str] = []

    def fetch(name: str, *args: Any, **kwargs: Any) -> None:
        repositories.append(name)
        raise ImportError("not in this test")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", fetch)
    return repositories


@pytest.mark.parametrize("named", KERNELS.values(), ids=KERNELS)
def test_kernel_in_config_is_not_fetched(folder: Path, named: dict[str, Any], fetched_kernels: list[str]) -> None:
    edit_config(folder, **named)
    loads: list[Callable[[], Any]] = [
        lambda: read_config(folder),
        lambda: AutoModelForCausalLM.from_pretrained(folder),
        lambda: start_engine("hf-generate", folder),
    ]
    for load in loads:
        with pytest.raises(RemoteCodeError, match=r"(someone|kernels-community)/.*trust_remote_code=True"):
            load()
    assert not fetched_kernels


@since("5.13")
def test_requested_or_trusted_kernel_is_fetched(folder: Path, fetched_kernels: list[str]) -> None:
    with pytest.raises((ImportError, ValueError)):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="someone/kernel")
    edit_config(folder, attn_implementation="someone/other")
    with pytest.raises((ImportError, ValueError)):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert fetched_kernels == ["someone/kernel", "someone/other"]


def test_unrelated_values_with_slashes_load(folder: Path) -> None:
    edit_config(folder, attn_implementation="eager", _name_or_path="someone/model", implementation_notes="a/b")
    assert read_config(folder)._attn_implementation == "eager"


class Payload:
    """An object that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_pickled_weights_are_not_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Payload(tmp_path / "was-run")}, folder / "pytorch_model.bin")
    opened = []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: opened.append(args))
    loads: dict[str, Callable[[], Any]] = {
        "ours": lambda: AutoModelForCausalLM.from_pretrained(folder),
        "quantized": lambda: AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
        ),
    }
    for name, load in loads.items():
        with pytest.raises(CheckpointError, match=r"safetensors"):
            print(name, load())
    with pytest.raises((CheckpointError, OSError), match=r"safetensors"):
        start_engine("hf-generate", folder)
    assert not opened
    assert not (tmp_path / "was-run").exists()


def test_pickle_next_to_safetensors_is_ignored(folder: Path, llama: PreTrainedModel) -> None:
    torch.save({"model.norm.weight": Payload(folder / "was-run")}, folder / "pytorch_model.bin")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.lm_head.weight, llama.lm_head.weight)
    assert not (folder / "was-run").exists()


CONFIGURATION = """
from transformers import PreTrainedConfig

class OwnConfig(PreTrainedConfig):
    model_type = "own-code"
"""


@pytest.mark.parametrize(
    ("configuration", "modeling", "named"),
    [
        (CONFIGURATION, "1 / 0", "modeling_own.OwnForCausalLM"),
        (CONFIGURATION, "no syntax", "modeling_own.OwnForCausalLM"),
        (CONFIGURATION, "import no_such_package", "modeling_own.OwnForCausalLM"),
        (CONFIGURATION, "", "modeling_own.OwnForCausalLM"),
        (CONFIGURATION, "class OwnForCausalLM: ...", "modeling_own.OwnForCausalLM"),
        (CONFIGURATION, "", "no_such_file.OwnForCausalLM"),
        (CONFIGURATION, "", "without_a_class"),
        ("1 / 0", "", "modeling_own.OwnForCausalLM"),
    ],
    ids=ascii,
)
def test_remote_code_failure_raises(configuration: str, modeling: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "configuration_own.py").write_text(configuration)
    (tmp_path / "modeling_own.py").write_text(modeling)
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": named}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own-code", "auto_map": auto_map}))
    with pytest.raises(RemoteCodeError, match=r"own code, which auto_map in config\.json names, failed: "):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize("auto_map", ["x", [1], {"AutoConfig": 5}], ids=ascii)
def test_invalid_auto_map_raises(auto_map: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own-code", "auto_map": auto_map}))
    with pytest.raises(CheckpointError, match=r"auto_map: is .*expected an object"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


def test_remote_code_for_known_model_type(folder: Path) -> None:
    code = "from transformers import LlamaModel\n\nclass LlamaForRewardModel(LlamaModel): ..."
    (folder / "modeling_own.py").write_text(code)
    auto_map = {"AutoModel": "modeling_own.LlamaForRewardModel"}
    edit_config(folder, architectures=["LlamaForRewardModel"], auto_map=auto_map)
    with pytest.raises(RemoteCodeError, match="own code for a base model"):
        AutoModel.from_pretrained(folder)
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "LlamaForRewardModel"


def write_remote_code(folder: Path) -> None:
    """Change the model type of a Llama checkpoint to one that is defined by three Python files in it."""
    files = {
        "configuration_own.py": "from transformers import LlamaConfig\n\nclass OwnConfig(LlamaConfig):\n"
        "    model_type = 'own'",
        "layers_own.py": "SCALE = 2.0",
        "modeling_own.py": "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "from .layers_own import SCALE\n\nclass OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig",
    }
    for name, code in files.items():
        (folder / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=auto_map)


@pytest.mark.parametrize("method", ["from_pretrained", "from_config"])
def test_remote_code_is_saved_with_model(method: str, folder: Path, tmp_path: Path) -> None:
    write_remote_code(folder)
    if method == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    else:
        config = read_config(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    assert {file.name for file in saved.glob("*.py")} == {"configuration_own.py", "layers_own.py", "modeling_own.py"}
    shutil.rmtree(folder)
    again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"
    assert_same(again.state_dict(), model.state_dict())


TIMM_MODEL = "Gemma3nForConditionalGeneration"

TIMM: dict[str, dict[str, Any]] = {
    "model_args.checkpoint_path": {"model_args": {"checkpoint_path": "payload.pth"}},
    "model_args.pretrained": {"model_args": {"pretrained": True}},
    "model_args.pretrained_cfg_overlay": {"model_args": {"pretrained_cfg_overlay": {"file": "payload.pth"}}},
    "architecture": {"architecture": "local-dir:other"},
}
"""Values of a vision configuration with which timm reads another file or directory, by the key in the error."""


@pytest.mark.parametrize("key", TIMM)
def test_timm_files_in_config_are_not_read(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if unmet := registry.unmet_requirement(TIMM_MODEL):
        pytest.skip(f"needs {unmet}")
    config = FamilyCase(registry.model_class(TIMM_MODEL)).config.to_dict()
    vision = config["vision_config"] | TIMM[key]
    vision["model_args"] = config["vision_config"]["model_args"] | TIMM[key].get("model_args", {})
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
    torch.save({}, tmp_path / "payload.pth")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail(f"opens {args[0]}"))
    loads: list[Callable[[], Any]] = [
        lambda: read_config(tmp_path),
        lambda: AutoModel.from_pretrained(tmp_path),
        lambda: start_engine("hf-generate", tmp_path, load_format="dummy"),
    ]
    for load in loads:
        with pytest.raises(CheckpointError, match=f"vision_config.{key}"):
            load()


@pytest.mark.parametrize("file", ["processor_config.json", "audio_tokenizer_config.json"])
def test_audio_tokenizer_of_processor_is_not_read(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "checkpoint", tmp_path / "other"
    gemma4_processor(FamilyCase(registry.model_class("Gemma4ForConditionalGeneration")).config).save_pretrained(folder)
    load_processor(folder)
    codec = DacModel(DacConfig(encoder_hidden_size=8, decoder_hidden_size=16, downsampling_ratios=[2], n_codebooks=1))
    codec.config.save_pretrained(other)
    torch.save(codec.state_dict(), other / "pytorch_model.bin")
    named = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": str(other)}
    if file == "processor_config.json":
        named = json.loads((folder / file).read_text()) | {"audio_tokenizer": named}
    (folder / file).write_text(json.dumps(named))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail(f"opens {args[0]}"))
    with pytest.raises(CheckpointError, match="audio_tokenizer"):
        load_processor(folder)
