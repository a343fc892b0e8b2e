"""Create checkpoints, damage them, and compare their contents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.errors import StateDictError
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def new_model(
    config: PreTrainedConfig, kind: str = "ForCausalLM", *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """Create transformers' model for `config` with random values in every tensor."""
    torch.manual_seed(seed)
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    model = getattr(transformers, name + kind)._from_config(config, dtype=dtype)
    randomize(model)
    return model


def peaked_llama(folder: Path) -> Path:
    """Save a tiny Llama whose logits spread over several nats, so that errors are visible."""
    model = new_model(tiny_config(transformers.LlamaConfig))
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    model.save_pretrained(folder)
    return folder


def edit_weights(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], file: str = WEIGHTS
) -> dict[str, torch.Tensor]:
    """Rewrite one file of a checkpoint with its tensors changed by `edit`, and return them."""
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return tensors


def edit_config(folder: Path, **values: Any) -> None:
    """Change values in a checkpoint's `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> dict[str, str]:
    """Change the weight map of a checkpoint's index, and return it."""
    content = json.loads((folder / INDEX).read_text())
    edit(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))
    return content["weight_map"]


def weight_map(folder: Path) -> dict[str, str]:
    """Return the weight map of a checkpoint's index."""
    return json.loads((folder / INDEX).read_text())["weight_map"]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor in a checkpoint's files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def hf_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Convert one of our models to transformers' state dict of the same model."""
    return model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that names, dtypes, shapes and values are identical."""
    assert sorted(actual) == sorted(expected)
    different = [
        name
        for name, tensor in expected.items()
        if actual[name].dtype != tensor.dtype or not torch.equal(actual[name], tensor)
    ]
    assert not different


def assert_same_model(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Check that one of our models has the same parameters and buffers as a Hugging Face model."""
    assert_same(hf_tensors(model), reference.state_dict())
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


def problems(error: StateDictError) -> set[tuple[str, str]]:
    """Return the kind and subject of each problem in an error. Checks that the message shows each and their number."""
    message = str(error)
    assert f"({len(error.problems)} problem" in message
    for problem in error.problems:
        assert str(problem) in message
    return {(problem.kind, problem.subject) for problem in error.problems}


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy a module's tensors, to check later that they have not changed."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
