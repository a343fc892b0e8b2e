"""`dtype="auto"` loads in the dtype that transformers would choose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM as HFLlama

from nrl_models import AutoModelForCausalLM

INDEX = "model.safetensors.index.json"


def _one_fp32_norm(folder: Path) -> None:
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


def _first_tensor_in_fp32(folder: Path) -> None:
    _one_fp32_norm(folder)
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[min(tensors)] = tensors[min(tensors)].float()
    save_file(tensors, file, metadata={"format": "pt"})


def _dtype_in_the_index(folder: Path) -> None:
    _first_tensor_in_fp32(folder)
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        index["metadata"]["dtype"] = "float16"
        (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("edit", [_one_fp32_norm, _first_tensor_in_fp32, _dtype_in_the_index])
def test_dtype_without_one_in_the_configuration(
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


def test_training_in_a_default_16_bit_dtype_warns_once(
    llama_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=torch.bfloat16).save_pretrained(tmp_path)

    def warnings_of(**options: Any) -> list[str]:
        caplog.clear()
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        model.train()
        model.eval()
        model.train()
        return [record.getMessage() for record in caplog.records if "round away" in record.getMessage()]

    (message,) = warnings_of()
    assert message.startswith("LlamaForCausalLM is trained in bfloat16, the dtype of its checkpoint.")
    assert not warnings_of(dtype=torch.bfloat16)
    assert not warnings_of(dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.requires_grad_(False)  # as adapters do
    caplog.clear()
    model.train()
    assert not caplog.records
