"""`dtype="auto"` loads in the dtype that transformers would choose."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import edit_config, new_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM as HFLlama
from transformers import PreTrainedModel, Qwen3_5Config
from versions import needs

import nrl_models
from nrl_models import AutoModelForCausalLM
from nrl_models.testing.tiny import tiny_config

INDEX = "model.safetensors.index.json"


def cast_all_but_norm_to_bf16(folder: Path) -> None:
    """Cast everything but a norm to bf16. safetensors then writes the norm first."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        save_file(
            {
                name: tensor if name == "model.norm.weight" else tensor.to(torch.bfloat16)
                for name, tensor in tensors.items()
            },
            file,
            metadata={"format": "pt"},
        )


def store_first_tensor_in_fp32(folder: Path) -> None:
    cast_all_but_norm_to_bf16(folder)
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[min(tensors)] = tensors[min(tensors)].float()
    save_file(tensors, file, metadata={"format": "pt"})


def store_dtype_in_index(folder: Path) -> None:
    store_first_tensor_in_fp32(folder)
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        index["metadata"]["dtype"] = "float16"
        (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("edit", [cast_all_but_norm_to_bf16, store_first_tensor_in_fp32, store_dtype_in_index])
def test_auto_dtype_without_config_dtype(
    edit: Callable[[Path], None], sharded: bool, llama_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    if sharded:
        HFLlama.from_pretrained(llama_checkpoint).save_pretrained(folder, max_shard_size="200KB")
    else:
        shutil.copytree(llama_checkpoint, folder)
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for file in (*folder.glob("*.safetensors"), folder / INDEX):
            file.unlink(missing_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder)
    edit_config(folder, dtype=None, torch_dtype=None)
    expected = HFLlama.from_pretrained(folder, dtype="auto")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {expected.dtype}


@pytest.mark.parametrize("half", ["lm_head.weight", "model.norm.weight"])
def test_state_dict_dtype_is_that_of_first_tensor(half: str, llama: PreTrainedModel) -> None:
    config = copy.deepcopy(llama.config)
    config.dtype = None
    tensors = llama.state_dict()
    tensors = {half: tensors[half].half(), **{name: each for name, each in tensors.items() if name != half}}
    for state_dict in (tensors, dict(reversed(tensors.items()))):
        expected = HFLlama.from_pretrained(None, config=config, state_dict=dict(state_dict))
        model = AutoModelForCausalLM.from_pretrained(None, config=config, state_dict=state_dict)
        assert model.dtype == expected.dtype


@needs("Qwen3_5ForConditionalGeneration")
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("auto", ["AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel"])
def test_dtype_in_text_config(auto: str, name: str, tmp_path: Path) -> None:
    new_model(tiny_config(Qwen3_5Config, {}), "ForConditionalGeneration").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in content["text_config"].items() if key != "dtype"}
    edit_config(tmp_path, dtype=None, text_config=text | {name: "bfloat16"})
    expected = getattr(transformers, auto).from_pretrained(tmp_path)
    model = getattr(nrl_models, auto).from_pretrained(tmp_path)
    assert model.dtype == expected.dtype
    assert model.dtype == (torch.bfloat16 if auto == "AutoModelForCausalLM" else torch.float32)


def test_training_in_auto_16_bit_dtype_warns_once(
    llama_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=torch.bfloat16).save_pretrained(tmp_path)

    def dtype_warnings(**options: Any) -> list[str]:
        caplog.clear()
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        model.train()
        model.eval()
        model.train()
        return [record.getMessage() for record in caplog.records if "round away" in record.getMessage()]

    (message,) = dtype_warnings()
    assert message.startswith("LlamaForCausalLM is trained in bfloat16, the dtype of its checkpoint.")
    assert not dtype_warnings(dtype=torch.bfloat16)
    assert not dtype_warnings(dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.requires_grad_(False)  # as adapters do
    caplog.clear()
    model.train()
    assert not caplog.records
